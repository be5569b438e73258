"""relu2ir.inductor: the pass in Inductor's slots, beside other passes, and its report when caches are warm."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import relu2ir

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
ROOT = Path(__file__).parents[1]
OP = torch.ops.relu2ir.relu_squared.default


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    import torch._functorch.config
    from torch._inductor import config

    torch._dynamo.reset()
    with config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        yield


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (F.relu(self.up(x)) ** 2 * 0.5).chunk(2, -1)
        return self.down(F.silu(gate) * up)


def captured(level: str = "pre_grad") -> fx.Graph:
    """One graph as Inductor hands it to the slot: ``relu`` and ``square`` of a float32 [3, 4]."""
    from torch._subclasses import FakeTensorMode

    graph = fx.Graph()
    x = graph.placeholder("x")
    if level == "pre_grad":
        r = graph.call_function(F.relu, (x,), {"inplace": False})
        y = graph.call_function(torch.square, (r,))
    else:
        r = graph.call_function(torch.ops.aten.relu.default, (x,))
        y = graph.call_function(torch.ops.aten.pow.Tensor_Scalar, (r, 2))
    graph.output((y,))
    with FakeTensorMode():
        for node in (x, r, y):
            node.meta["val" if level == "post_grad" else "example_value"] = torch.empty_strided((3, 4), (1, 3))
    fx.GraphModule(nn.Module(), graph)
    return graph


def called(graph: fx.Graph) -> list[Any]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def gradients(model: nn.Module, call: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """The output and every gradient."""
    model.zero_grad()
    out = call(x)
    out.sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("providers", [None, pytest.param("cpp", marks=pytest.mark.needs("cpp"))])
def test_training_through_the_slot_before_autograd(providers: str | None) -> None:
    model, x = Block(), torch.randn(3, 4)
    with relu2ir.inductor.fusing(providers=providers) as fused:
        found = gradients(model, torch.compile(model), x)
    for expected, value in zip(gradients(model, model, x), found, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
    (result,) = fused.results
    assert [(site.op, site.provider) for site in result.sites] == [
        ("relu2ir::relu_squared", providers or "native"),
        ("relu2ir::silu_and_mul", providers or "native"),
    ]
    if providers is None:
        assert result.notes == ("pre_grad: ops are plain PyTorch, which Inductor fuses with their neighbours",)
    else:
        assert result.notes == tuple(
            f"{op} by 'cpp' is opaque to Inductor, which could fuse it with 'mul': drop the request for 'cpp' to let it"
            for op in ("relu_squared", "silu_and_mul")
        )
    assert fused.cached == 0


@pytest.mark.needs("cpp")
def test_inference_through_the_slot_after_autograd_runs_the_kernel() -> None:
    from torch._inductor.utils import run_and_get_code

    model, x = Block().eval(), torch.randn(3, 4)
    with torch.no_grad(), relu2ir.inductor.fusing("post_grad", "cpp") as fused:
        found, (code,) = run_and_get_code(torch.compile(model), x)
        torch.testing.assert_close(found, model(x), rtol=1e-5, atol=1e-6)
    assert "torch.ops.relu2ir_cpp.relu_squared.kernel" in code
    assert [site.provider for site in fused.results[0].sites] == ["cpp"] * len(fused.results[0].sites)


def test_the_slot_before_autograd_raises_in_place() -> None:
    graph = captured()
    pass_ = relu2ir.inductor.FusePass()
    pass_(graph)
    assert called(graph) == [OP]
    graph.lint()
    (node,) = graph.find_nodes(op="call_function", target=OP)
    assert node.meta["example_value"].stride() == (1, 3)
    pass_(graph)
    assert [len(result.sites) for result in pass_.fused.results] == [1, 0]


@pytest.mark.needs("cpp")
def test_the_slot_after_autograd_calls_the_kernel_with_its_own_meta() -> None:
    graph = captured("post_grad")
    relu2ir.inductor.FusePass("post_grad", "cpp")(graph)
    kernel = torch.ops.relu2ir_cpp.relu_squared.kernel
    assert called(graph) == [kernel]
    (node,) = graph.find_nodes(op="call_function", target=kernel)
    assert (node.meta["val"].shape, node.meta["val"].stride()) == ((3, 4), (1, 3))
    assert node.meta["eager_input_vals"][0][0].stride() == (1, 3)


def test_after_autograd_nothing_changes_without_a_request() -> None:
    graph = captured("post_grad")
    pass_ = relu2ir.inductor.FusePass("post_grad")
    before = str(graph)
    pass_(graph)
    assert str(graph) == before
    assert len(pass_.fused.results[0].sites) == 1
    assert "found and left as it was" in str(pass_.fused)


def test_after_autograd_native_is_written_as_inductor_reads_it() -> None:
    graph = captured("post_grad")
    relu2ir.inductor.FusePass("post_grad", "native")(graph)
    assert called(graph) == [torch.ops.aten.relu.default, torch.ops.aten.pow.Tensor_Scalar]
    assert all(node.meta["val"].shape == (3, 4) for node in graph.nodes if node.op == "call_function")


def test_an_override_is_a_request() -> None:
    graph = captured()
    with relu2ir.use(providers="native"):
        relu2ir.inductor.FusePass()(graph)
    assert called(graph) == [torch.relu, torch.square]


def test_a_request_that_cannot_be_met_is_refused() -> None:
    with pytest.raises(relu2ir.ProviderError, match=r"relu_squared cannot run with .*'cuda'"):
        relu2ir.inductor.FusePass(providers="cuda")(captured())
    with pytest.raises(relu2ir.ProviderError, match="unknown provider 'cudda'"):
        relu2ir.inductor.FusePass(providers="cudda")
    with pytest.raises(relu2ir.FuseError, match=r"unknown slot 'postgrad' .*did you mean 'post_grad'"):
        relu2ir.inductor.FusePass("postgrad")  # type: ignore[arg-type]


def test_uuids_differ_where_behaviour_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from relu2ir import inductor, library, registry

    def uuids() -> set[str]:
        ways = [("pre_grad", None), ("post_grad", None), ("pre_grad", "cpp"), ("pre_grad", "cpp,native")]
        return {inductor.FusePass(where, providers).uuid() for where, providers in ways}  # type: ignore[arg-type]

    first = uuids()
    assert len(first) == 4 and uuids() == first
    seen = set(first)
    with relu2ir.use(providers="native"):
        seen |= uuids()
    with relu2ir.use(platform="xpu"):
        seen |= uuids()
    with monkeypatch.context() as patch:
        patch.setattr(library, "_specs", dict(list(library._specs.items())[:1]))
        seen |= uuids()
    with monkeypatch.context() as patch:
        patch.setitem(registry.ROWS, "cpu", ("cpp", "native"))
        seen |= uuids()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "0.0")
        seen |= uuids()
    with monkeypatch.context() as patch:
        patch.setattr(inductor, "_SOURCES", "edited")
        seen |= uuids()
    assert len(seen) == 28
    assert uuids() == first


def test_passes_that_are_there_run_first_and_are_restored() -> None:
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    ran: list[str] = []

    class Theirs(CustomGraphPass):
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, graph: fx.Graph) -> None:
            ran.append(f"{self.name}: {len(graph.find_nodes(op='call_function', target=OP))}")

        def uuid(self) -> str:
            return self.name

    def plain(graph: fx.Graph) -> None:
        ran.append("plain")

    one, two = Theirs("one"), Theirs("two")
    mine = relu2ir.inductor.FusePass().uuid()
    for there, ids, order in (
        (None, (mine,), []),
        (one, ("one", mine), ["one: 0"]),
        ([one, two], ("one", "two", mine), ["one: 0", "two: 0"]),
        (plain, None, ["plain"]),
        ([plain, one], None, ["plain", "one: 0"]),
    ):
        ran.clear()
        with config.patch(pre_grad_custom_pass=there):
            with contextlib.suppress(KeyError), relu2ir.inductor.fusing() as fused:
                outer = config.pre_grad_custom_pass
                assert outer.uuid() == ids
                outer(captured())
                with relu2ir.inductor.fusing(providers="native"):
                    assert config.pre_grad_custom_pass is not outer
                assert config.pre_grad_custom_pass is outer
                raise KeyError
            assert config.pre_grad_custom_pass == there
        assert ran == order
        assert len(fused.results[0].sites) == 1
    assert config.pre_grad_custom_pass is None and config.post_grad_custom_post_pass is None


def test_a_pass_that_asks_whether_it_is_inference_is_told() -> None:
    from torch._inductor import config, custom_graph_pass

    asking = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)
    if asking is None:
        pytest.skip("this torch has no passes that ask")
    told: list[bool] = []

    class Asking(asking):  # type: ignore[misc, valid-type]
        def __call__(self, graph: fx.Graph, is_inference: bool) -> None:
            told.append(is_inference)

        def uuid(self) -> str:
            return "asking"

    with torch.no_grad(), config.patch(post_grad_custom_post_pass=Asking()), relu2ir.inductor.fusing("post_grad"):
        torch.compile(lambda x: x + 1)(torch.randn(3))
    assert told == [True]


WARM = """
import json, warnings
warnings.simplefilter("ignore")
import torch, torch.nn.functional as F, relu2ir
from relu2ir.fx.backend import relu2ir_backend

def step(call):
    x = torch.randn(3, 4, requires_grad=True)
    y = call(x)
    y.sum().backward()

reports = {}
for where in ("pre_grad", "post_grad"):
    with relu2ir.inductor.fusing(where) as fused:
        step(torch.compile(lambda x: F.relu(x) ** 2 * (3 if where == "pre_grad" else 4)))
    reports[where] = len(fused.results), fused.cached, str(fused)
found = []
options = {"on_report": found.append, "inner": "inductor"}
step(torch.compile(lambda x: F.relu(x) ** 2 * 5, backend=relu2ir_backend, options=options))
print(json.dumps({**reports, "backend": [str(report) for report in found]}))
"""


def in_a_new_process(cache: Path) -> dict[str, Any]:
    variables = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", WARM], env=variables, cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_on_a_warm_cache_the_report_is_true(tmp_path: Path) -> None:
    cold, warm = in_a_new_process(tmp_path), in_a_new_process(tmp_path)
    assert cold["pre_grad"][:2] == [1, 0] and "1 fused" in cold["pre_grad"][2]
    assert cold["post_grad"][:2] == [2, 0]  # forward and backward
    assert cold["backend"][0].startswith("1 fused")
    assert warm == {
        "pre_grad": [0, 1, "1 graph came from the compile cache and was not looked into here"],
        "post_grad": [0, 2, "2 graphs came from the compile cache and were not looked into here"],
        "backend": cold["backend"],
    }
