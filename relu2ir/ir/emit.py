"""Expression to the text of a target: one statement per distinct node, so what is shared is computed once.

A target is a value: its table of templates, how it writes a constant, and how it writes a statement. The tables stand
with their providers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from relu2ir.ir.expr import Call, Const, Expr, Name, fold, postorder, substitute
from relu2ir.ir.parse import parse
from relu2ir.ir.primitives import PRIMITIVES


@dataclass(frozen=True)
class Target:
    """How one target spells an expression.

    ``templates`` maps a primitive to a format string over its arguments by position (``"{0} * {0}"``); arguments are
    always plain names or constants. One without a template is written by its formula. ``statement`` is a format string
    over ``name`` and ``value``.
    """

    name: str
    templates: Mapping[str, str]
    constant: Callable[[float], str]
    statement: str


def emit(outputs: Sequence[Expr], target: Target) -> tuple[list[str], list[str]]:
    """The statements that compute ``outputs`` in order, and the name or constant that holds each output."""
    statements: list[str] = []

    def visit(node: Expr, args: list[str]) -> str:
        if isinstance(node, Name):
            return node.name
        if isinstance(node, Const):
            return target.constant(node.value)
        assert isinstance(node, Call)
        name = f"v{len(statements)}"
        value = target.templates[node.primitive].format(*args)
        statements.append(target.statement.format(name=name, value=value))
        return name

    written = expanded(outputs, target.templates)
    held = fold(written, visit)
    return statements, [held[output] for output in written]


def expanded(outputs: Sequence[Expr], kept: Collection[str] = ()) -> list[Expr]:
    """``outputs`` with each primitive that has a formula written by it, but for those that are ``kept``."""

    def visit(node: Expr, args: list[Expr]) -> Expr:
        if not isinstance(node, Call):
            return node
        formula = None if node.primitive in kept else _formula(node.primitive)
        if formula is None:
            return Call(node.primitive, tuple(args))
        return substitute(formula, dict(zip(PRIMITIVES[node.primitive].args, args)))

    found = fold(outputs, visit)
    return [found[output] for output in outputs]


@cache
def _formula(primitive: str) -> Expr | None:
    text = PRIMITIVES[primitive].formula
    # A formula may use others that have one: sigmoid in silu.
    return expanded([parse(text)])[0] if text else None


def used_names(outputs: Sequence[Expr]) -> list[str]:
    """The distinct names that ``outputs`` read, in order of first use."""
    return [node.name for node in postorder(outputs) if isinstance(node, Name)]
