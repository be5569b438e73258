"""The vocabulary: every primitive means one pointwise torch function, and its gradient is autograd's."""

import ast
import itertools

import pytest
import torch
from expressions import SPECIAL
from torch.utils._python_dispatch import TorchDispatchMode

from relu2ir.ir.emit import expanded
from relu2ir.ir.expr import Call, Name
from relu2ir.ir.gradient import gradient
from relu2ir.ir.parse import parse
from relu2ir.ir.primitives import PRIMITIVES
from relu2ir.oracle import evaluate, torch_function

DIFFERENTIABLE = [name for name, row in PRIMITIVES.items() if not row.is_condition]
HALF_TYPES = (torch.float16, torch.bfloat16)
NEAR_ONE = [1.0, 0.999, 1e-3, -1.0, 7.25]


class Overloads(TorchDispatchMode):
    """Collects the aten overloads that run beneath."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **kwargs or {})


def arguments(primitive: str, dtype=torch.float64) -> list[torch.Tensor]:
    """Every combination of special values, one tensor per argument of ``primitive``; conditions are bool."""
    kinds = [(True, False) if name == "c" else SPECIAL for name in PRIMITIVES[primitive].args]
    columns = zip(*itertools.product(*kinds), strict=True)
    return [
        torch.tensor(column, dtype=torch.bool if name == "c" else dtype)
        for name, column in zip(PRIMITIVES[primitive].args, columns, strict=True)
    ]


@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_the_meaning_is_one_pointwise_torch_function(primitive):
    args = arguments(primitive)
    with Overloads() as overloads:
        torch_function(primitive)(*args)
    assert len(overloads.seen) == 1
    assert torch.Tag.pointwise in overloads.seen[0].tags


@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_the_row_is_complete(primitive):
    row = PRIMITIVES[primitive]
    assert row.name == primitive
    assert len(row.gradient) == len(row.args)
    for rule in filter(None, row.gradient):
        names = {node.id for node in ast.walk(ast.parse(rule)) if isinstance(node, ast.Name)}
        assert names <= {*row.args, "grad", *PRIMITIVES}
    assert all(rule is None for rule in row.gradient) == row.is_condition


def derived_and_autograd(primitive: str, arrived: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each differentiable argument the derived gradient and autograd's, at every special value."""
    row, args = PRIMITIVES[primitive], arguments(primitive)
    leaves = [arg.requires_grad_() if rule else arg for arg, rule in zip(args, row.gradient, strict=True)]
    result = torch_function(primitive)(*leaves)
    grad = torch.full_like(result, arrived)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    expected = torch.autograd.grad(result, wanted, grad)
    rules = [parse(rule, conditions=("c",)) for rule in row.gradient if rule]
    values = {"grad": grad, **{name: leaf.detach() for name, leaf in zip(row.args, leaves, strict=True)}}
    return [(evaluate(rule, values, grad.dtype), value) for rule, value in zip(rules, expected, strict=True)]


@pytest.mark.parametrize("arrived", [1.0, -0.75, float("inf"), float("nan")])
@pytest.mark.parametrize("primitive", DIFFERENTIABLE)
def test_the_gradient_is_autograds_at_special_values(primitive, arrived):
    for derived, expected in derived_and_autograd(primitive, arrived):
        # rtol: 4 ulp of float64, atol: what 1 - t * t loses; NaN where autograd has NaN, an infinity where it has one.
        torch.testing.assert_close(derived, expected, rtol=1e-15, atol=1e-16, equal_nan=True)


def test_relu_keeps_nan_in_value_and_gradient():
    x = torch.tensor([float("nan"), -1.0, 0.0, -0.0, 2.0])
    assert torch.relu(x).isnan().tolist() == [True, False, False, False, False]
    (rule,) = gradient([(parse("relu(x)"), Name("grad"))], ["x"])
    assert evaluate(rule, {"x": x, "grad": torch.full_like(x, 3.0)}, x.dtype).tolist() == [3.0, 0.0, 0.0, 0.0, 3.0]


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("primitive", [name for name, row in PRIMITIVES.items() if not row.rounds])
def test_a_primitive_marked_exact_gives_half_values_that_need_no_rounding(primitive, dtype):
    row = PRIMITIVES[primitive]
    args = [arg if arg.dtype == torch.bool else arg.to(dtype) for arg in arguments(primitive)]
    wide = [arg if arg.dtype == torch.bool else arg.double() for arg in args]
    exact, rounded = torch_function(row.name)(*wide), torch_function(row.name)(*args)
    assert torch.equal(exact.nan_to_num(1.25), rounded.to(exact.dtype).nan_to_num(1.25))


@pytest.mark.parametrize("primitive", [name for name, row in PRIMITIVES.items() if row.rounds])
def test_a_primitive_marked_rounding_does_round(primitive):
    columns = zip(*itertools.product(NEAR_ONE, repeat=len(PRIMITIVES[primitive].args)), strict=True)
    args = [torch.tensor(column, dtype=torch.bfloat16) for column in columns]
    wide = torch_function(primitive)(*[arg.double() for arg in args])
    assert not torch.equal(wide.nan_to_num(), wide.bfloat16().double().nan_to_num())


@pytest.mark.parametrize("primitive", [name for name, row in PRIMITIVES.items() if row.formula])
def test_a_formula_is_the_primitives_value(primitive):
    """In float64, by a thousand values and at special ones."""
    row, args = PRIMITIVES[primitive], [torch.linspace(-8, 8, 1001, dtype=torch.float64)]
    args += [torch.full_like(args[0], bound) for bound in (-0.5, 1.25)[: len(row.numbers)]]
    (formula,) = expanded([parse(row.formula)])
    found = evaluate(formula, dict(zip(row.args, args, strict=True)), torch.float64)
    torch.testing.assert_close(found, torch_function(primitive)(*args), rtol=1e-9, atol=1e-15)
    special = arguments(primitive)
    found = evaluate(formula, dict(zip(row.args, special, strict=True)), torch.float64)
    torch.testing.assert_close(found, torch_function(primitive)(*special), rtol=1e-14, atol=1e-15, equal_nan=True)


EXTREMES = {  # of float64, to 17 digits
    ("sigmoid", -700.0): 9.85967654375977e-305,
    ("silu", -700.0): -6.90177358063184e-302,
    ("softplus", -700.0): 9.85967654375977e-305,
    ("gelu", -20.0): -5.507248237212468e-88,
    ("gelu_tanh", -8.0): -3.1077829375011112e-21,
}


@pytest.mark.parametrize(("primitive", "x"), EXTREMES)
def test_a_formula_holds_far_out_where_torchs_own_form_loses_every_digit(primitive, x):
    (formula,) = expanded([parse(PRIMITIVES[primitive].formula)])
    found = evaluate(formula, {"x": torch.tensor(x, dtype=torch.float64)}, torch.float64).item()
    assert found == pytest.approx(EXTREMES[primitive, x], rel=1e-12)


def test_operators_and_calls_cover_the_vocabulary_without_overlap():
    x, y, z = Name("x"), Name("y"), Name("z")
    for name, row in PRIMITIVES.items():
        args = (parse("where(x < y, x, y)").args[0] if name == "where" else x, y, z)[: len(row.args)]
        node = Call(name, args)
        readable = Call("where", (node, x, y)) if row.is_condition else node
        assert parse(str(readable)) is readable
