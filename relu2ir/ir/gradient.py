"""The gradient of expressions, as expressions: reverse mode over the shared graph, one rule per primitive.

The rules are the ``gradient`` column of `primitives.py`; nothing here knows a primitive by name except the few that
simplify (a term times one, a sum with nothing).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from relu2ir.ir.expr import Call, Const, Expr, Name, fold, postorder, substitute
from relu2ir.ir.parse import parse
from relu2ir.ir.primitives import PRIMITIVES

ZERO = Const(0.0)


@cache
def _rules(primitive: str) -> tuple[Expr | None, ...]:
    row = PRIMITIVES[primitive]
    return tuple(text if text is None else parse(text, conditions=("c",)) for text in row.gradient)


def gradient(outputs: Sequence[tuple[Expr, Expr]], names: Sequence[str]) -> tuple[Expr, ...]:
    """For each name the gradient of the outputs with respect to it.

    ``outputs`` pairs each expression with the gradient that arrives for it. A name that no output depends on has the
    gradient ``0``. Contributions are added in the order in which autograd adds them: last use first.
    """
    arrived: dict[Expr, Expr] = {}

    def add(node: Expr, term: Expr) -> None:
        arrived[node] = Call("add", (arrived[node], term)) if node in arrived else term

    for expr, grad in outputs:
        add(expr, grad)
    for node in reversed(postorder(expr for expr, _ in outputs)):
        if not isinstance(node, Call) or node not in arrived:
            continue
        row = PRIMITIVES[node.primitive]
        values = dict(zip(row.args, node.args, strict=True)) | {"grad": arrived[node]}
        for arg, rule in zip(node.args, _rules(node.primitive), strict=True):
            if rule is not None and not isinstance(arg, Const):
                add(arg, substitute(rule, values))
    return tuple(arrived.get(Name(name), ZERO) for name in names)


def without_poles(exprs: Sequence[Expr]) -> tuple[Expr, ...]:
    """``exprs`` with each sqrt(e) so written that its derivative is 0, not infinite, where e is 0.

    Of a gradient from the result: in 2 * sqrt(y) * grad the derivative by y is multiplied by y's own, 2 * sqrt(y), and
    infinity times 0 would make the second derivative NaN wherever x <= 0. The value is the same from 0 on, and for NaN.
    """
    rule = parse("where(x > 0, sqrt(where(x > 0, x, 1)), 0 * x)")

    def visit(node: Expr, args: list[Expr]) -> Expr:
        if not isinstance(node, Call):
            return node
        return substitute(rule, {"x": args[0]}) if node.primitive == "sqrt" else Call(node.primitive, tuple(args))

    found = fold(exprs, visit)
    return tuple(found[expr] for expr in exprs)
