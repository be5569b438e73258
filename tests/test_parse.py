"""The expression language: what it reads, and that it answers anything else with the place of the problem."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from relu2ir.errors import ExprError
from relu2ir.ir.expr import Call, Const, Expr, Name, depth
from relu2ir.ir.parse import MAX_DEPTH, MAX_LENGTH, parse
from relu2ir.ir.primitives import PRIMITIVES

VALUES = ["add", "sub", "mul", "div"]


def problem(text: str) -> str:
    """The error of ``text`` as ``start+width message``."""
    with pytest.raises(ExprError) as caught:
        parse(text)
    return f"{caught.value.start}+{caught.value.width} {caught.value.message}"


def test_operators_bind_as_in_arithmetic():
    a, b, c = map(Name, "abc")
    assert parse("a + b * c") is Call("add", (a, Call("mul", (b, c))))
    assert parse("a - b - c") is Call("sub", (Call("sub", (a, b)), c))
    assert parse("a / b / c") is Call("div", (Call("div", (a, b)), c))
    assert parse("-a * b") is Call("mul", (Call("neg", (a,)), b))
    assert parse("where(a + b <= c, a, b)") is Call("where", (Call("le", (Call("add", (a, b)), c)), a, b))


@pytest.mark.parametrize("symbol", ["<=", "<", ">=", ">"])
def test_each_comparison_is_read_inside_where(symbol):
    name = {"<=": "le", "<": "lt", ">=": "ge", ">": "gt"}[symbol]
    assert parse(f"where(x {symbol} 0, 0, x)").args[0] is Call(name, (Name("x"), Const(0)))


def test_a_minus_before_a_number_belongs_to_the_number():
    assert parse("-2") is Const(-2)
    assert parse("-(2)") is Call("neg", (Const(2),))


def test_space_and_line_breaks_do_not_matter():
    assert parse("\n square (\t relu( x )\n)  ") is parse("square(relu(x))")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("square(rleu(x))", "7+4 unknown primitive 'rleu'; did you mean 'relu'?"),
        ("", "0+1 expected a number, a name or '('; the expression ends"),
        ("relu(x", "6+1 expected ')'; the expression ends"),
        ("relu(x))", "7+1 expected an operator or the end of the expression; found ')'"),
        ("x y", "2+1 expected an operator or the end of the expression; found 'y'"),
        ("2x", "1+1 expected an operator or the end of the expression; found 'x'"),
        ("x +", "3+1 expected a number, a name or '('; the expression ends"),
        ("relu(x, y)", "0+4 'relu' takes 1 argument; found 2"),
        ("relu()", "0+4 'relu' takes 1 argument; found 0"),
        ("where(x <= 0, x)", "0+5 'where' takes 3 arguments; found 2"),
        ("x ** 2", "2+2 unexpected '**'; write square(x) for x ** 2"),
        ("x.relu()", "1+1 unexpected '.'; an expression has no attributes or methods: call a primitive, as in relu(x)"),
        ("x[0]", "1+1 unexpected '['; an expression cannot index: name the halves or pairs of a packed input under "
         "'inputs'"),
        ("relu(x=y)", "6+1 unexpected '='; nothing is assigned or passed by keyword"),
        ("x; y", "1+1 unexpected ';'; use numbers, names, calls, + - * / and one comparison inside where"),
        ("x < 0", "0+5 a comparison is only allowed as the first argument of 'where'"),
        ("(x < 0) * x", "8+1 a comparison is only allowed as the first argument of 'where'"),
        ("where(x < y < 0, x, y)", "12+1 a comparison is only allowed as the first argument of 'where'"),
        ("relu(x < 0)", "0+4 a comparison is only allowed as the first argument of 'where'"),
        ("-(x < 0)", "0+1 a comparison is only allowed as the first argument of 'where'"),
        ("where(x, x, y)", "0+5 the first argument of 'where' must be a comparison, as in where(x <= 0, 0, x)"),
        ("1e999 * x", "0+5 the number '1e999' does not fit float64"),
    ],
)  # fmt: skip
def test_a_problem_is_named_at_its_place(text, expected):
    assert problem(text) == expected


@pytest.mark.parametrize("name", VALUES + ["neg", "le"])
def test_operators_have_one_spelling(name):
    assert problem(f"{name}(x, y)").startswith(f"0+{len(name)} unknown primitive '{name}'")


def test_too_long_a_text_is_refused_before_it_is_read():
    assert depth(parse("x" + " " * (MAX_LENGTH - 1))) == 0
    assert problem("x" * (MAX_LENGTH + 1)) == f"0+1 the expression has 2001 characters; the limit is {MAX_LENGTH}"


@pytest.mark.parametrize(
    "text",
    [
        "(" * 1000 + "x" + ")" * 999,
        "-" * 1999 + "x",
        "relu(" * 333 + "x" + ")" * 333,
        "+".join("x" * 1000),
        "1-(" * 500,
        "where(x<0,0," * 100 + "x" + ")" * 100,
    ],
)
def test_hostile_depth_is_an_expression_error(text):
    assert len(text) <= MAX_LENGTH
    assert f"the expression nests deeper than {MAX_DEPTH} levels" in problem(text)


def test_the_deepest_expression_allowed_is_read():
    assert depth(parse("+".join("x" * (MAX_DEPTH + 1)))) == MAX_DEPTH


_PIECES = st.sampled_from(
    [*PRIMITIVES, *"xy()+-*/<>,.[]=;", "<=", "**", "1e9", "0.5", " ", "\n", "é", "\0", "__import__"]
)


@given(st.text() | st.lists(_PIECES, max_size=60).map("".join))
@example("\ud800")
@example("x\u2028+ y")
@example("\u0661 + x")
@example("x" * 1999 + "(")
def test_any_text_is_an_expression_or_an_expression_error_inside_it(text):
    try:
        found: Expr | ExprError = parse(text)
    except ExprError as error:
        found = error
    if isinstance(found, ExprError):
        assert 0 <= found.start <= max(len(text), 1)
        assert found.width >= 1
    else:
        assert depth(found) <= MAX_DEPTH
        assert parse(str(found)) is found
