"""How else a graph may compute what an expression means: other nodes with its value, one table for all ops.

`spellings` says how one node writes a primitive; here several nodes stand for one, as decompositions leave them, or
one node of another name for several.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from relu2ir.ir.expr import Call, Const, Expr, Name, fold, substitute
from relu2ir.ir.parse import parse


def canonical(expr: Expr) -> Expr:
    """The one form of what can be written in two: ``a * a`` is ``square(a)``."""

    def visit(node: Expr, args: list[Expr]) -> Expr:
        if not isinstance(node, Call):
            return node
        if node.primitive == "mul" and args[0] is args[1]:
            return Call("square", (args[0],))
        return Call(node.primitive, tuple(args))

    return fold([expr], visit)[expr]


@dataclass(frozen=True)
class Form:
    """``written`` has the value of ``means``; names stand for any expressions. ``forward_only``: its gradient differs.

    ``written`` may call what only graphs have (`spellings.OTHERS`).
    """

    means: Expr
    written: Expr
    forward_only: bool = False


def _form(means: str, written: str | Expr, forward_only: bool = False) -> Form:
    return Form(
        canonical(parse(means)), canonical(parse(written)) if isinstance(written, str) else written, forward_only
    )


_X, _T, _V, _LOW, _HIGH = map(Name, ("x", "t", "v", "low", "high"))

FORMS = (
    _form("square(x)", Call("mul", (_X, _X))),
    _form("square(x)", Call("pow", (_X, Const(2)))),
    _form("square(x) * x", Call("pow", (_X, Const(3)))),
    _form("relu(x)", "where(x <= 0, 0, x)"),
    # At NaN and at 0 their gradients are not relu's.
    _form("relu(x)", "clamp_min(x, 0)", forward_only=True),
    _form("relu(x)", "maximum(x, 0)", forward_only=True),
    _form("where(x <= t, v, x)", Call("threshold", (_X, _T, _V))),
    _form("clamp(x, low, high)", "clamp_max(clamp_min(x, low), high)"),
    # At the bounds its gradient is 0.
    _form("clamp(x, low, high)", Call("hardtanh", (_X, _LOW, _HIGH)), forward_only=True),
    # As torch's decompositions and many models write them.
    _form("silu(x)", "x * sigmoid(x)"),
    _form("silu(x)", "x / (1 + exp(-x))"),
    _form("softplus(x)", "where(x > 20, x, log1p(exp(x)))"),
    _form("gelu(x)", "0.5 * x * (1 + erf(0.7071067811865476 * x))"),
    _form("gelu(x)", "0.5 * x * (1 + erf(x / 1.4142135623730951))"),
    _form("gelu(x)", "x * (0.5 * (1 + erf(x / 1.4142135623730951)))"),
    _form("gelu_tanh(x)", "0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * (x * x * x))))"),
)


@cache
def forms_of(expr: Expr) -> tuple[tuple[Expr, bool], ...]:
    """The other forms of ``expr`` as a whole, each with whether its gradient differs."""
    found = []
    for form in FORMS:
        binding: dict[str, Expr] = {}
        if _stands_for(form.means, expr, binding):
            found.append((substitute(form.written, binding), form.forward_only))
    return tuple(found)


@cache
def names_of(expr: Expr) -> tuple[str, ...]:
    """The names by which the root of ``expr`` may be found in a graph."""
    assert isinstance(expr, Call)
    others = (name for form, _ in forms_of(expr) for name in names_of(form))
    return tuple(dict.fromkeys((expr.primitive, *others)))


@cache
def largest(expr: Expr) -> int:
    """How many calls ``expr`` has in its longest form."""
    own = isinstance(expr, Call) + sum(map(largest, expr.args))
    return max([own, *(largest(form) for form, _ in forms_of(expr))])


def _stands_for(means: Expr, expr: Expr, binding: dict[str, Expr]) -> bool:
    if isinstance(means, Name):
        return binding.setdefault(means.name, expr) is expr
    if not isinstance(means, Call) or not isinstance(expr, Call):
        return means is expr
    same = means.primitive == expr.primitive
    return same and all(_stands_for(a, b, binding) for a, b in zip(means.args, expr.args, strict=True))
