"""What a spelling alone does not show: modes that change, writes that no name tells of, types that nobody knows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import relu2ir
from relu2ir import specfile
from relu2ir.fx.backend import relu2ir_backend
from relu2ir.fx.patterns import patterns
from relu2ir.fx.rewrite import find_ops

OWN = """
namespace: other
ops:
  gated: {inputs: [a, b], expr: silu(a) * b}
  shifted: {inputs: [x], expr: relu(x) + 1}
  scaled: {inputs: [x], params: {p: 2.0}, expr: relu(x) * p}
  clipped: {inputs: [x], params: {p: 0.0}, expr: "where(x > p, silu(x), p)"}
"""


def reasons(captured: Callable, root: nn.Module | None = None) -> list[str]:
    """The ops found and the reasons of the near misses in ``captured`` for the ops above."""
    graph = captured.graph if isinstance(captured, fx.GraphModule) else fx.Tracer().trace(captured)
    found, near = find_ops(graph, root or nn.Module(), patterns(specfile.read_text(OWN).ops))
    return [match.spec.name for match in found] + [match.flaw.code for match in near if match.flaw]


def squared_without_grad(x: torch.Tensor) -> torch.Tensor:
    r = torch.relu(x)
    with torch.no_grad():
        s = torch.square(r)
    return x * s


def squared_in_inference_mode(x: torch.Tensor) -> torch.Tensor:
    r = torch.relu(x)
    with torch.inference_mode():
        s = torch.square(r)
    return x + s.sum()


def squared_under_autocast(x: torch.Tensor) -> torch.Tensor:
    r = torch.relu(x)
    with torch.autocast("cpu", torch.bfloat16):
        s = torch.square(r)
    return x * s


def split_without_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        gate, up = x.chunk(2, -1)
    return F.silu(gate) * up + x[..., :1]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (squared_without_grad, ["mode_change"]),
        (squared_in_inference_mode, ["mode_change"]),
        (squared_under_autocast, ["mode_change"]),
        (split_without_grad, []),  # as two tensors, behind the change
    ],
)
def test_a_mode_that_changes_inside_the_spelling_is_left_to_it(function: Callable, expected: list[str]) -> None:
    torch._dynamo.reset()
    reports = []
    options = {"inner": "eager", "on_report": reports.append}
    gradients = []
    for call in (function, torch.compile(function, backend=relu2ir_backend, options=options)):
        leaf = torch.tensor([1.0, 2.0], requires_grad=True)
        call(leaf).sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)
    assert [miss.reason for report in reports for miss in report.near_misses] == expected


def test_a_mode_around_the_whole_spelling_does_not_matter() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            s = torch.square(torch.relu(x))
        return x * s

    torch._dynamo.reset()
    reports = []
    call = torch.compile(function, backend=relu2ir_backend, options={"inner": "eager", "on_report": reports.append})
    leaf = torch.tensor([1.0, 2.0], requires_grad=True)
    call(leaf).sum().backward()
    assert torch.equal(leaf.grad, torch.tensor([1.0, 4.0]))
    assert [len(report.sites) for report in reports] == [1]


def transposed(h: torch.Tensor) -> torch.Tensor:
    gate, up = h.chunk(2, -1)
    h.t_()
    return F.silu(gate) * up


def unsqueezed(h: torch.Tensor) -> torch.Tensor:
    gate, up = h.chunk(2, -1)
    h.unsqueeze_(0)
    return F.silu(gate) * up


def pointed_elsewhere(h: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    gate, up = h.chunk(2, -1)
    h.set_(other)
    return F.silu(gate) * up


@pytest.mark.parametrize("function", [transposed, unsqueezed, pointed_elsewhere])
def test_a_packed_tensor_is_read_where_it_is_split(function: Callable) -> None:
    captured = fx.symbolic_trace(function)
    result = relu2ir.fuse(captured)
    assert [miss.reason for miss in result.near_misses] == ["mutated"]
    h = torch.randn(4, 4)
    given = [h, torch.ones(8)][: len([n for n in captured.graph.nodes if n.op == "placeholder"])]
    assert torch.equal(result.module(*(t.clone() for t in given)), function(*(t.clone() for t in given)))


def norm(x, mean, var):  # type: ignore[no-untyped-def]
    gate = F.silu(mean)
    F.batch_norm(x, mean, var, training=True)
    return torch.mul(gate, var)


def torch_norm(x, mean, var):  # type: ignore[no-untyped-def]
    gate = F.silu(mean)
    torch.batch_norm(x, None, None, mean, var, True, 0.1, 1e-5, False)
    return torch.mul(gate, var)


def aten_norm(x, mean, var):  # type: ignore[no-untyped-def]
    gate = F.silu(mean)
    torch.ops.aten.batch_norm.default(x, None, None, mean, var, True, 0.1, 1e-5, False)
    return torch.mul(gate, var)


def instance_norm(x, mean, var):  # type: ignore[no-untyped-def]
    gate = F.silu(mean)
    F.instance_norm(x, mean, var)
    return torch.mul(gate, var)


def renormed(x, weight):  # type: ignore[no-untyped-def]
    gate = F.silu(weight)
    F.embedding(x, weight, max_norm=1.0)
    return torch.mul(gate, x)


@pytest.mark.parametrize("function", [norm, torch_norm, aten_norm, instance_norm, renormed])
def test_functions_that_write_their_statistics_are_writers(function: Callable) -> None:
    assert reasons(function) == ["mutated"]


def test_functions_that_only_read_their_statistics_are_not() -> None:
    def evaluated(x, mean, var):  # type: ignore[no-untyped-def]
        gate = F.silu(mean)
        F.batch_norm(x, mean, var, training=False)
        return torch.mul(gate, var)

    def looked_up(x, weight):  # type: ignore[no-untyped-def]
        gate = F.silu(weight)
        F.embedding(x, weight)
        return torch.mul(gate, x)

    assert reasons(evaluated) == reasons(looked_up) == ["gated"]


def test_statistics_written_elsewhere_cost_no_site() -> None:
    def normed(x, weight, mean, var):  # type: ignore[no-untyped-def]
        h = F.batch_norm(x, mean, var, training=True)
        return F.batch_norm((F.relu(h) + 1) @ weight, mean, var, training=True)

    def multiplied(x, weight, mean, var):  # type: ignore[no-untyped-def]
        return F.batch_norm(F.relu(x @ weight) + 1, mean, var, training=True)

    assert reasons(normed) == reasons(multiplied) == ["shifted"]


class Inner(nn.Module):
    """A module of a user's, which may write to its own tensors and may return them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.ones(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.state.copy_(x)


class Outer(nn.Module):
    def __init__(self, child: nn.Module, tensor: str) -> None:
        super().__init__()
        self.child, self.tensor = child, tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = getattr(self.child, self.tensor)
        gate = F.silu(value.view(-1, 3))
        self.child(x + 1)
        return torch.mul(gate, x)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = Inner()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        value = self.child(x + 1)
        gate = F.silu(value)
        self.child(y + 1)
        return torch.mul(gate, y)


class Leaves(fx.Tracer):
    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Outer(nn.BatchNorm1d(3), "running_mean"), "mutated"),
        (Outer(Inner(), "state"), "mutated"),
        (Outer(nn.Embedding(3, 3, max_norm=1.0), "weight"), "mutated"),
        (Outer(nn.Embedding(3, 3), "weight"), "gated"),
        (Outer(nn.Linear(3, 3), "weight"), "gated"),
        (Twice(), "mutated"),
    ],
    ids=["BatchNorm1d", "a user's", "Embedding(max_norm)", "Embedding", "Linear", "called twice"],
)
def test_a_module_may_write_to_its_own_tensors(model: nn.Module, expected: str) -> None:
    graph_module = fx.GraphModule(model, Leaves().trace(model))
    assert reasons(graph_module, model) == [expected]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: F.relu(x) + 1, "shifted"),
        (lambda x: F.relu(x) + 1.0, "unknown_type"),
        (lambda x: F.relu(x) * 1.5, "scaled"),
        (lambda x: F.relu(x) * 3.0, "scaled"),
        (lambda x: F.relu(x) * 3, "unknown_type"),
    ],
    ids=["+ 1", "+ 1.0", "* 1.5", "* 3.0", "* 3"],
)
def test_a_literal_that_gives_integers_another_type_needs_known_types(function: Callable, expected: str) -> None:
    assert reasons(function) == [expected]


class FloatExponent(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) ** 2.0


def test_a_float_exponent_makes_floats_of_integers() -> None:
    whole = torch.tensor([-1, 3])
    model = nn.Sequential(FloatExponent())
    result = relu2ir.fuse(model)
    assert [miss.reason for miss in result.near_misses] == ["unknown_type"]
    assert result.module(whole).dtype is torch.float32
    for x, expected in ((whole, "dtype_change"), (whole.float(), None), (whole.half(), None)):
        captured = torch.export.export(model, (x,)).module()
        result = relu2ir.fuse(captured)
        assert [miss.reason for miss in result.near_misses] == ([expected] if expected else [])
        assert len(result.sites) == (expected is None)
        assert torch.equal(result.module(x), model(x))


def test_zeros_of_two_signs_are_two_params() -> None:
    assert reasons(lambda x: torch.where(x > 0.5, F.silu(x), 0.5)) == ["clipped"]
    assert reasons(lambda x: torch.where(x > 0.0, F.silu(x), -0.0)) == []


@pytest.mark.parametrize("number", [10**400, 2**53 + 1])
def test_a_number_that_is_no_float_is_no_param(number: int) -> None:
    assert reasons(lambda x: F.relu(x) * number) == []
