"""The corpus of spellings in every kind of graph: an op is found where it survives, no decoy is rewritten."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from spelling_corpus import CORPUS, Entry
from torch import fx, nn

import relu2ir
from relu2ir import library

Capture = Callable[[nn.Module, torch.Tensor], fx.GraphModule]
# Of torch's own run_decompositions.
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")
NAMES = {"torch": torch, "F": F, "math": math, "aten": torch.ops.aten}


class Layers(nn.Module):
    """What the corpus's texts call."""

    def __init__(self) -> None:
        super().__init__()
        self.relu, self.relu_inplace, self.relu6 = nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6()
        self.silu, self.gelu, self.gelu_tanh, self.softplus = nn.SiLU(), nn.GELU(), nn.GELU("tanh"), nn.Softplus()
        self.hardtanh, self.threshold = nn.Hardtanh(0.0, 6.0), nn.Threshold(0, 0)
        self.identity, self.dropout = nn.Identity(), nn.Dropout(0.5)
        self.bias = nn.Parameter(torch.linspace(-1, 1, 8))


def module_of(entry: Entry) -> nn.Module:
    *statements, last = entry.text.split("; ")
    body = "".join(f"    {line}\n" for line in (*statements, last if "return" in last else f"return {last}"))
    scope: dict[str, Callable] = {}
    exec(f"def forward(self, x):\n{body}", NAMES, scope)
    return type("Spelling", (Layers,), scope)()


def symbolic(model: nn.Module, x: torch.Tensor) -> fx.GraphModule:
    return fx.symbolic_trace(model)


def dynamo(model: nn.Module, x: torch.Tensor) -> fx.GraphModule:
    graphs: list[fx.GraphModule] = []

    def keep(graph_module: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(graph_module)
        return graph_module.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=keep)(x.clone())
    return graphs[0]


def exported(model: nn.Module, x: torch.Tensor) -> fx.GraphModule:
    return torch.export.export(model, (x,)).module()


def decomposed(model: nn.Module, x: torch.Tensor) -> fx.GraphModule:
    return torch.export.export(model, (x,)).run_decompositions().module()


class _Seen(Exception):
    pass


def _in_inductor(model: nn.Module, x: torch.Tensor, slot: str) -> fx.GraphModule:
    """The graph that Inductor hands to a pass in ``slot``; no code is generated from it."""
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.Graph) -> None:
        copied = fx.Graph()
        copied.output(copied.graph_copy(graph, {}))
        graphs.append(fx.GraphModule(graph.owning_module, copied))
        raise _Seen

    torch._dynamo.reset()
    off = torch._inductor.config.patch({slot: keep, "fx_graph_cache": False})
    with off, torch.no_grad(), pytest.raises(Exception, match="_Seen"):
        torch.compile(model)(x.clone())
    return graphs[0]


def pre_grad(model: nn.Module, x: torch.Tensor) -> fx.GraphModule:
    return _in_inductor(model, x, "pre_grad_custom_pass")


def post_grad(model: nn.Module, x: torch.Tensor) -> fx.GraphModule:
    return _in_inductor(model, x, "post_grad_custom_post_pass")


CAPTURES: dict[str, Capture] = {
    capture.__name__: capture for capture in (symbolic, dynamo, exported, decomposed, pre_grad, post_grad)
}
OPEN = [(entry, name) for entry in CORPUS for name in CAPTURES if entry.kind != "decoy" and name not in entry.lost]
LOST = [(entry, name) for entry in CORPUS for name in entry.lost]
DECOYS = [(entry, name) for entry in CORPUS for name in CAPTURES if entry.kind == "decoy"]


def ids(value: object) -> str:
    return value.text if isinstance(value, Entry) else str(value)


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    special = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, 3e38, -3.0, 3.0, 0.01, -1e-3, 20.5]
    normal = torch.randn(2, 3, 8, dtype=torch.float64) * 3
    return [normal[0].to(dtype), normal[1].to(dtype), torch.tensor([*special, *special[::-1]]).reshape(3, 8).to(dtype)]


def run(graph_module: fx.GraphModule, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The graph's first result for ``x``; Dynamo and Inductor make the model's tensors inputs of it."""
    places = graph_module.graph.find_nodes(op="placeholder")
    values = [value for node in places if (value := node.meta.get("val", node.meta.get("example_value"))) is not None]
    given = [model.bias.detach() if value.dim() == 1 else x for value in values]
    result = graph_module(*(given or [x]))
    return result if isinstance(result, torch.Tensor) else result[0]


def difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of each two elements; 0 where both are the same infinity or NaN."""
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, (a - b).abs().nan_to_num(nan=math.inf))


def test_the_corpus_is_what_it_says() -> None:
    texts = Counter((entry.text, entry.dtype) for entry in CORPUS)
    assert max(texts.values()) == 1
    kinds = Counter(entry.kind for entry in CORPUS)
    assert kinds["exact"] >= 100 and kinds["forward"] >= 15 and kinds["decoy"] >= 30
    assert {entry.op for entry in CORPUS} - {""} <= {spec.name for spec in library.specs()}


@pytest.mark.parametrize(("entry", "capture"), OPEN, ids=ids)
def test_a_spelling_is_found_and_computes_the_same(entry: Entry, capture: str) -> None:
    model, dtype = module_of(entry).to(getattr(torch, entry.dtype)), getattr(torch, entry.dtype)
    captured = CAPTURES[capture](model, torch.randn(3, 8, dtype=dtype))
    if entry.kind == "forward":
        unknown = relu2ir.fuse(captured)
        if capture != "post_grad":  # which writes hardtanh as the clamps that it then is
            assert [site.op for site in unknown.sites] == ([f"relu2ir::{entry.op}"] if known_without(captured) else [])
    result = relu2ir.fuse(captured, inference=True)
    assert [site.op for site in result.sites] == [f"relu2ir::{entry.op}"], result
    assert not result.near_misses
    spec = library.find(entry.op)
    with torch.no_grad():
        for x in inputs(dtype):
            before, after = (run(graph_module, model, x.clone()) for graph_module in (captured, result.module))
            assert (before.dtype, before.shape) == (after.dtype, after.shape)
            if spec.exact:
                assert not difference(before, after).any()
            else:
                wanted = model.double()(x.double()).to(torch.float64)
                model.to(dtype)
                allowed = difference(before.double(), wanted) * 1.05 + roundings(wanted, before, dtype)
                assert (difference(after.double(), wanted) <= allowed).all()


def known_without(graph_module: fx.GraphModule) -> bool:
    """Whether the capture says that no gradient flows: Dynamo, under no_grad, of an input that needs none."""
    values = [node.meta.get("example_value") for node in graph_module.graph.find_nodes(op="placeholder")]
    return any(isinstance(value, torch.Tensor) and not value.requires_grad for value in values)


def roundings(wanted: torch.Tensor, before: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A rounding or two of the largest term, and of the subnormals that torch's own silu flushes."""
    scale = torch.maximum(wanted.abs(), before.double().abs()).nan_to_num(posinf=0.0) + 1.0
    return 2 * torch.finfo(dtype).eps * scale


@pytest.mark.parametrize(("entry", "capture"), LOST, ids=ids)
def test_what_a_capture_loses_is_known(entry: Entry, capture: str) -> None:
    """A spelling that begins to be found there is a line to change in the corpus."""
    dtype = getattr(torch, entry.dtype)
    captured = CAPTURES[capture](module_of(entry).to(dtype), torch.randn(3, 8, dtype=dtype))
    assert f"relu2ir::{entry.op}" not in [site.op for site in relu2ir.fuse(captured, inference=True).sites]


@pytest.mark.parametrize(("entry", "capture"), DECOYS, ids=ids)
def test_a_decoy_is_left_alone_and_named(entry: Entry, capture: str) -> None:
    captured = CAPTURES[capture](module_of(entry), torch.randn(3, 8))
    result = relu2ir.fuse(captured, inference=True)
    if capture in entry.lost:  # what is left there may hold another op
        assert "relu2ir::relu_squared" not in [site.op for site in result.sites]
    else:
        assert not result.sites
        assert result.module.code == captured.code
        assert [miss.reason for miss in result.near_misses] == ([entry.near] if entry.near else [])


WRITES_OVER = {entry.text for entry in CORPUS if re.search(r"_\(2\)|square_|mul_|\*=", entry.text)}


@pytest.mark.parametrize("entry", [e for e in CORPUS if e.kind == "exact" and e.dtype == "float32"], ids=ids)
def test_gradients_are_those_of_the_spelling(entry: Entry) -> None:
    """But where the spelling writes over what its own gradient needs, which fusing makes legal."""
    model = module_of(entry).double()
    captured = exported(model, torch.randn(3, 8, dtype=torch.float64))
    fused = relu2ir.fuse(captured).module
    weights = torch.linspace(-1, 2, 24, dtype=torch.float64)
    for x in inputs(torch.float64)[:2]:
        expected, found = (x.clone().requires_grad_() for _ in range(2))
        result = run(fused, model, found)
        result.backward(weights[: result.numel()].reshape(result.shape))
        if entry.text in WRITES_OVER:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                run(captured, model, expected).sum().backward()
            continue
        run(captured, model, expected).backward(weights[: result.numel()].reshape(result.shape))
        if library.find(entry.op).exact:
            assert torch.equal(found.grad, expected.grad)
        else:
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-9, atol=1e-9)
