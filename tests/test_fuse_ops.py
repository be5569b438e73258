"""Every op of ops.yaml is found where a graph computes its expression, whatever capture wrote the graph."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from test_fuse import dynamo, exported, ops_of
from torch import fx, nn

import relu2ir
from relu2ir import library, operands
from relu2ir.fx.forms import canonical
from relu2ir.fx.patterns import patterns
from relu2ir.ir.expr import Call, postorder
from relu2ir.registry import provider
from relu2ir.spec import OpSpec

OWN = [spec for spec in library.specs() if spec.namespace == "relu2ir"]
# A choice that depends on params alone is made by Python, so no graph holds it.
FOUND = [p.spec for p in patterns(OWN) if p.expr is canonical(p.spec.expr) and p.spec.name != "situ_and_mul"]


def plain(spec: OpSpec) -> Callable[..., torch.Tensor]:
    """The op's expression as a user writes it, its params being numbers in the text."""
    native, params = provider("native", "").lower(spec), list(spec.params.values())
    return lambda *tensors: native(*tensors, *params)


def called(function: Callable[..., torch.Tensor], tensors: list[torch.Tensor], capture: str) -> fx.GraphModule:
    """The captured graph of ``function``, which takes all tensors."""

    class Model(nn.Module):
        def forward(self, tensors: list[torch.Tensor]) -> torch.Tensor:
            return function(*tensors)

    if capture == "export":
        return torch.export.export(Model(), (tensors,)).module()
    graphs: list[fx.GraphModule] = []

    def keep(graph_module: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(graph_module)
        return graph_module.forward

    torch._dynamo.reset()
    torch.compile(Model(), backend=keep)(tensors)
    (graph_module,) = graphs
    return graph_module


@pytest.mark.parametrize("capture", ["dynamo", "export"])
@pytest.mark.parametrize("spec", FOUND, ids=lambda spec: spec.name)
def test_an_op_is_found_by_its_expression(spec, capture):
    _, tensors = next(operands.inputs(spec, torch.float32, torch.device("cpu")))
    result = relu2ir.fuse(called(plain(spec), tensors, capture))
    assert [site.op for site in result.sites] == [spec.qualname]
    assert ops_of(result.module) == [spec.qualname]
    given = (tensors,) if capture == "export" else tensors
    found = result.module(*given)
    found = found if isinstance(found, torch.Tensor) else found[0]
    assert torch.equal(found, plain(spec)(*tensors))


def test_only_ops_of_one_primitive_and_choices_by_params_are_not_looked_for():
    rest = {spec.name for spec in library.specs()} - {spec.name for spec in FOUND}
    single = {s.name for s in library.specs() if sum(isinstance(n, Call) for n in postorder([s.expr])) == 1}
    assert rest - single == {"situ_and_mul"}


SPELLINGS: dict[str, tuple[str, Callable[..., torch.Tensor]]] = {
    "transformers' NewGELU": (
        "gelu_new",
        lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))),
    ),
    "transformers' QuickGELU": ("gelu_quick", lambda x: x * torch.sigmoid(1.702 * x)),
    "gpt-oss's pairs": (
        "swigluoai_and_mul",
        lambda x: (
            (x[..., 1::2].clamp(min=-7.0, max=7.0) + 1)
            * (x[..., ::2].clamp(min=None, max=7.0) * torch.sigmoid(x[..., ::2].clamp(min=None, max=7.0) * 1.702))
        ),
    ),
    "gelu's argument": (
        "gelu_tanh_and_mul",
        lambda x: F.gelu(x.chunk(2, -1)[0], approximate="tanh") * x.chunk(2, -1)[1],
    ),
    "erf by default": ("gelu_and_mul", lambda x: F.gelu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]),
    "mish": ("mish", lambda x: x * F.softplus(x, beta=1, threshold=20).tanh()),
}


@pytest.mark.parametrize("capture", [dynamo, exported], ids=lambda capture: capture.__name__)
@pytest.mark.parametrize("name", SPELLINGS)
def test_a_formula_is_found_as_its_authors_write_it(name, capture):
    op, function = SPELLINGS[name]
    x = torch.randn(3, 8)
    result = relu2ir.fuse(capture(function, x))
    assert [site.op for site in result.sites] == [f"relu2ir::{op}"]
    found = result.module(x)
    torch.testing.assert_close(found if isinstance(found, torch.Tensor) else found[0], function(x))


DECOYS: dict[str, Callable[..., torch.Tensor]] = {
    "another beta": lambda x: x * F.softplus(x, beta=2).tanh(),
    "another threshold": lambda x: x * F.softplus(x, threshold=10).tanh(),
    "another power": lambda x: 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 4.0)))),
    "odd elements first": lambda x: (
        (x[..., ::2].clamp(-7.0, 7.0) + 1)
        * (x[..., 1::2].clamp(max=7.0) * torch.sigmoid(x[..., 1::2].clamp(max=7.0) * 1.702))
    ),
    "the first of each pair twice": lambda x: (
        (x[..., ::2].clamp(-7.0, 7.0) + 1)
        * (x[..., ::2].clamp(max=7.0) * torch.sigmoid(x[..., ::2].clamp(max=7.0) * 1.702))
    ),
    "another limit above than below": lambda x: (
        (x[..., 1::2].clamp(-7.0, 6.0) + 1)
        * (x[..., ::2].clamp(max=7.0) * torch.sigmoid(x[..., ::2].clamp(max=7.0) * 1.702))
    ),
}


@pytest.mark.parametrize("name", DECOYS)
def test_what_only_looks_like_an_op_is_left_alone(name):
    assert relu2ir.fuse(dynamo(DECOYS[name], torch.randn(3, 8))).sites == ()


def test_a_vector_is_told_by_its_shape():
    x, bias, full = torch.randn(3, 8), torch.randn(8), torch.randn(3, 8)
    function = plain(library.find("bias_relu_squared"))
    assert [s.op for s in relu2ir.fuse(called(function, [x, bias], "export")).sites] == ["relu2ir::bias_relu_squared"]
    swapped = relu2ir.fuse(called(lambda b, x: function(x, b), [bias, x], "export"))
    assert [site.op for site in swapped.sites] == ["relu2ir::bias_relu_squared"]
    # Two full tensors, and shapes that a capture does not know: relu_squared of the sum.
    assert [s.op for s in relu2ir.fuse(called(function, [x, full], "export")).sites] == ["relu2ir::relu_squared"]
    untyped = fx.symbolic_trace(lambda x, bias: torch.square(torch.relu(x + bias)))
    assert [site.op for site in relu2ir.fuse(untyped).sites] == ["relu2ir::relu_squared"]


def test_a_layer_is_read_as_it_is_set():
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act, self.up = nn.GELU(approximate="tanh"), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(x) * self.up(x)

    model, x = Gated(), torch.randn(3, 8)
    result = relu2ir.fuse(model)
    assert [site.op for site in result.sites] == ["relu2ir::gelu_tanh_mul"]
    assert torch.equal(result.module(x), model(x))
    result.module.act.approximate = "none"
    assert torch.equal(result.module(x), F.gelu(x) * model.up(x))


HALVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "chunk": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "split": lambda x: F.silu(x.split(4, -1)[0]) * x.split(4, -1)[1],
    "split by sizes": lambda x: F.silu(torch.split(x, [4, 4], dim=1)[0]) * torch.split(x, [4, 4], dim=1)[1],
    "slices": lambda x: F.silu(x[..., :4]) * x[..., 4:],
    "slices by the shape": lambda x: F.silu(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :],
    "slices from the end": lambda x: F.silu(x[..., :-4]) * x[..., -4:],
    "narrow": lambda x: F.silu(x.narrow(-1, 0, 4)) * torch.narrow(x, 1, 4, 4),
}


@pytest.mark.parametrize("capture", [dynamo, exported], ids=lambda capture: capture.__name__)
@pytest.mark.parametrize("name", HALVES)
def test_halves_are_found_however_they_are_taken(name, capture):
    x = torch.randn(3, 8)
    result = relu2ir.fuse(capture(HALVES[name], x))
    assert [site.op for site in result.sites] == ["relu2ir::silu_and_mul"]
    found = result.module(x)
    assert torch.equal(found if isinstance(found, torch.Tensor) else found[0], HALVES[name](x))


NO_HALVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of another dimension": lambda x: F.silu(x[:4]) * x[4:],
    "overlapping": lambda x: F.silu(x[..., :4]) * x[..., 3:7],
    "the second first": lambda x: F.silu(x[..., :4]) * x[..., :4],
    "thirds": lambda x: F.silu(x.chunk(4, -1)[0]) * x.chunk(4, -1)[1],
}


@pytest.mark.parametrize("name", NO_HALVES)
def test_other_parts_are_two_tensors(name):
    x = torch.randn(8, 8)
    result = relu2ir.fuse(dynamo(NO_HALVES[name], x))
    assert [site.op for site in result.sites] == ["relu2ir::silu_mul"]
    (found,) = result.module(x)
    assert torch.equal(found, NO_HALVES[name](x))


FORWARD_ONLY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clamp(min=0)": lambda x: x.clamp(min=0) ** 2,
    "clamp(0)": lambda x: torch.clamp(x, 0).square(),
    "clamp_min": lambda x: torch.clamp_min(x, 0.0).square(),
    "relu6": lambda x: x * F.relu6(x + 3) / 6,
}


@pytest.mark.parametrize("name", FORWARD_ONLY)
def test_what_differs_in_its_gradient_only_is_raised_where_none_flows(name):
    function = FORWARD_ONLY[name]
    x = torch.tensor([math.nan, -1.0, -0.0, 0.0, 2.0, math.inf, -math.inf, 4.0])
    op = "relu2ir::hardswish" if name == "relu6" else "relu2ir::relu_squared"
    without = relu2ir.fuse(dynamo(function, x))  # Dynamo saw that x requires no gradient, and guards on it
    assert [site.op for site in without.sites] == [op]
    (found,) = without.module(x)
    assert torch.equal(found.nan_to_num(7.5), function(x).nan_to_num(7.5))
    for graph in dynamo(function, x.clone().requires_grad_()), exported(function, x):
        result = relu2ir.fuse(graph)
        assert (result.sites, [miss.reason for miss in result.near_misses]) == ((), ["gradient"])
        assert [site.op for site in relu2ir.fuse(graph, inference=True).sites] == [op]


CASTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "up and down inside": lambda g, u: F.silu(g.float()).to(g.dtype) * u,
    "type_as": lambda g, u: F.silu(g.to(torch.float32)).type_as(g) * u,
}


@pytest.mark.parametrize("capture", ["dynamo", "export"])
@pytest.mark.parametrize("name", CASTS)
def test_a_round_trip_of_types_is_raised_as_one_that_rounds_once(name, capture):
    gate, up = (torch.randn(64, 8).bfloat16() for _ in range(2))
    graph = called(CASTS[name], [gate, up], capture)
    result = relu2ir.fuse(graph)
    assert [(site.op, site.exact) for site in result.sites] == [("relu2ir::silu_mul", False)]
    given = ([gate, up],) if capture == "export" else (gate, up)
    found, plain_result = result.module(*given), CASTS[name](gate, up)
    found = found if isinstance(found, torch.Tensor) else found[0]
    right = F.silu(gate.double()) * up.double()
    assert found.dtype == torch.bfloat16
    assert (found.double() - right).abs().max() <= (plain_result.double() - right).abs().max() + 2.0**-7
    assert relu2ir.fuse(graph, exact=True).sites == ()


def test_float32_over_several_steps_is_not_given_up():
    gate, up = (torch.randn(4, 8).bfloat16() for _ in range(2))
    graph = called(lambda g, u: (F.silu(g.float()) * u.float()).to(torch.bfloat16), [gate, up], "dynamo")
    (site,) = relu2ir.fuse(graph).sites
    assert (site.op, site.dtype) == ("relu2ir::silu_mul", torch.float32)


def test_a_cast_that_the_result_keeps_stays():
    gate, up = (torch.randn(4, 8).bfloat16() for _ in range(2))
    graph = called(lambda g, u: F.silu(g.float()) * u, [gate, up], "dynamo")
    (site,) = relu2ir.fuse(graph).sites
    assert site.tensors[0].dtype == torch.float32  # of what the cast gave
    masked = called(lambda g, u: F.silu(g.half().float()).bfloat16() * u, [gate, up], "dynamo")
    for site in relu2ir.fuse(masked).sites:
        assert site.tensors[0].dtype != torch.bfloat16
