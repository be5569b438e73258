"""The derived gradient of whole expressions equals torch autograd's, in float64."""

import pytest
import torch
from expressions import NAMES, SPECIAL, expressions
from hypothesis import given
from hypothesis import strategies as st

from relu2ir.ir.expr import Const, Name, postorder
from relu2ir.ir.gradient import gradient
from relu2ir.ir.parse import parse
from relu2ir.oracle import evaluate

GRAD = Name("grad")
ACTIVATIONS = ["square(relu(x))", "silu(x) * y", "x * sigmoid(1.702 * x)", "relu(x) + relu(x)", "x * x * x",
               "where(x <= y, x * y, y / 2)", "sqrt(square(x) + square(y))"]  # fmt: skip


def derived(text: str, *names: str) -> list[str]:
    return [str(expr) for expr in gradient([(parse(text), GRAD)], names or ("x",))]


def agrees_with_autograd(expr, x, y, rtol) -> None:
    leaves = {"x": x.clone().requires_grad_(), "y": y.clone().requires_grad_()}
    arrived = torch.linspace(-1.5, 2.0, x.numel(), dtype=x.dtype)
    result = evaluate(expr, leaves, x.dtype).expand(x.shape)
    expected = [torch.zeros_like(x)] * 2
    if result.requires_grad:
        found = torch.autograd.grad(result, list(leaves.values()), arrived, allow_unused=True)
        expected = [zero if value is None else value for zero, value in zip(expected, found, strict=True)]
    for name, term, value in zip(NAMES, gradient([(expr, GRAD)], NAMES), expected, strict=True):
        got = evaluate(term, {"x": x, "y": y, "grad": arrived}, x.dtype).expand(x.shape)
        torch.testing.assert_close(
            got, value, rtol=rtol, atol=0, equal_nan=True, msg=lambda text, n=name: f"{n}: {text}"
        )


@given(expressions(st.sampled_from([0.0, -0.0, 1.0, 2.0, -0.5, 1.702])))
def test_the_gradient_of_any_expression_is_autograds(expr):
    x = torch.tensor([-3.0, -1.25, -0.5, 0.25, 1.0, 2.5], dtype=torch.float64)
    agrees_with_autograd(expr, x, x.flip(0) + 0.125, rtol=1e-9)


@pytest.mark.parametrize("text", ACTIVATIONS)
def test_the_gradient_of_an_activation_is_autograds_at_special_values(text):
    x, y = torch.cartesian_prod(*[torch.tensor(SPECIAL, dtype=torch.float64)] * 2).T
    agrees_with_autograd(parse(text), x.contiguous(), y.contiguous(), rtol=1e-14)


def test_the_formulas_are_those_of_the_rules():
    assert derived("square(relu(x))") == ["where(x <= 0, 0, grad * (2 * relu(x)))"]
    assert derived("x * y", "x", "y") == ["grad * y", "grad * x"]
    assert derived("-x") == ["-grad"]
    assert derived("x") == ["grad"]


def test_a_name_that_the_expression_does_not_read_has_gradient_zero():
    assert derived("relu(x)", "x", "y")[1] == "0"
    assert gradient([(Const(3), GRAD)], ["x"]) == (Const(0.0),)


def test_the_contributions_of_several_uses_and_outputs_are_added():
    assert derived("relu(x) + relu(x)") == ["where(x <= 0, 0, grad + grad)"]
    (sum_of_two,) = gradient([(parse("2 * x"), Name("g")), (parse("-x"), Name("h"))], ["x"])
    values = {"x": torch.tensor(5.0), "g": torch.tensor(3.0), "h": torch.tensor(10.0)}
    assert evaluate(sum_of_two, values, torch.float32).item() == 3.0 * 2 - 10.0


def test_an_op_may_call_its_inputs_as_the_rules_call_their_arguments():
    assert derived("b / a", "a", "b") == ["-grad * (b / a / a)", "grad / a"]


def test_the_gradient_of_a_deep_chain_stays_small_because_terms_are_shared():
    expr = parse("silu(" * 40 + "x" + ")" * 40)
    assert len(postorder(gradient([(expr, GRAD)], ["x"]))) < 40 * 12
