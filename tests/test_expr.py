"""Expressions: one object per meaning, linear traversals, text that reads back."""

import copy
import math
import pickle

import pytest
from expressions import expressions
from hypothesis import given
from hypothesis import strategies as st

from relu2ir.ir.emit import Target, emit, used_names
from relu2ir.ir.expr import Call, Const, Expr, Name, depth, format_number, postorder, substitute
from relu2ir.ir.parse import parse
from relu2ir.ir.primitives import PRIMITIVES

ANY_NUMBER = st.floats(allow_nan=False, allow_infinity=False)
TEXT = Target("text", {name: f"{name} {' '.join(map('{{{}}}'.format, range(len(row.args))))}"
                       for name, row in PRIMITIVES.items()}, repr, "{name} = {value}")  # fmt: skip


def doubled(times: int) -> Expr:
    """x + x, that plus itself, ...: 2 ** times leaves in ``times`` nodes."""
    expr: Expr = Name("x")
    for _ in range(times):
        expr = Call("add", (expr, expr))
    return expr


def test_equal_expressions_are_one_object():
    assert parse("square(relu(x)) + 1") is Call("add", (Call("square", (Call("relu", (Name("x"),)),)), Const(1)))
    assert parse("x + y") is not parse("y + x")


def test_zero_and_minus_zero_are_two_constants():
    assert Const(0.0) is not Const(-0.0)
    assert math.copysign(1.0, Const(-0.0).value) == -1.0
    assert str(parse("x * -0")) == "x * -0"


@given(expressions(ANY_NUMBER))
def test_text_reads_back_as_the_same_object(expr):
    assert parse(str(expr)) is expr
    assert str(parse(str(expr))) == str(expr)


@given(ANY_NUMBER)
def test_numbers_read_back_bit_for_bit(value):
    assert float(format_number(value)).hex() == value.hex()


@pytest.mark.parametrize(
    ("written", "printed"),
    [
        ("a - (b - c)", "a - (b - c)"),
        ("(a - b) - c", "a - b - c"),
        ("(a + b) * c", "(a + b) * c"),
        ("a / (b * c)", "a / (b * c)"),
        ("-(a * b)", "-(a * b)"),
        ("-a * b", "-a * b"),
        ("-(-x)", "-(-x)"),
        ("-(2) * x", "-(2) * x"),
        ("x * -2.50", "x * -2.5"),
        ("where(x <= 0, 0, x)", "where(x <= 0, 0, x)"),
        ("((relu((x))))", "relu(x)"),
        ("1e3 * x + .5", "1000 * x + 0.5"),
    ],
)
def test_printing_keeps_only_the_brackets_that_mean_something(written, printed):
    assert str(parse(written)) == printed


@given(expressions(ANY_NUMBER))
def test_pickle_and_deepcopy_give_the_same_object(expr):
    assert pickle.loads(pickle.dumps(expr)) is expr
    assert copy.deepcopy(expr) is expr


def test_expressions_are_immutable():
    with pytest.raises(AttributeError):
        Name("x").name = "y"
    with pytest.raises(AttributeError):
        Name("x").fields = ("y",)


def test_postorder_lists_each_node_once_arguments_first_left_to_right():
    assert [str(node) for node in postorder([parse("relu(x) * y + relu(x)")])] == [
        "x", "relu(x)", "y", "relu(x) * y", "relu(x) * y + relu(x)",
    ]  # fmt: skip


def test_traversals_are_linear_in_distinct_nodes_and_need_no_python_stack():
    expr = doubled(5000)  # 2 ** 5000 leaves
    assert len(postorder([expr])) == 5001
    assert depth(expr) == 5000
    assert depth(substitute(expr, {"x": Name("y")})) == 5000


def test_substitution_is_simultaneous():
    assert substitute(parse("x - y"), {"x": Name("y"), "y": Name("x")}) is parse("y - x")


def test_emission_computes_what_is_shared_once():
    statements, held = emit([parse("silu(x) * silu(x)"), parse("silu(x) + 2")], TEXT)
    assert statements == ["v0 = silu x", "v1 = mul v0 v0", "v2 = add v0 2.0"]
    assert held == ["v1", "v2"]


def test_an_output_that_is_an_input_or_a_constant_needs_no_statement():
    assert emit([Name("x"), Const(1.5)], TEXT) == ([], ["x", "1.5"])


def test_used_names_come_in_order_of_first_use():
    assert used_names([parse("up * silu(gate)"), parse("gate + x")]) == ["up", "gate", "x"]
