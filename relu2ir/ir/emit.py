"""Expression to the text of a target: one statement per distinct node, so what is shared is computed once.

A target is a value: its table of templates, how it writes a constant, and how it writes a statement. The tables stand
with their providers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from relu2ir.ir.expr import Call, Const, Expr, Name, fold, postorder


@dataclass(frozen=True)
class Target:
    """How one target spells an expression.

    ``templates`` maps each primitive to a format string over its arguments by position (``"{0} * {0}"``); arguments
    are always plain names or constants. ``statement`` is a format string over ``name`` and ``value``.
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

    held = fold(outputs, visit)
    return statements, [held[output] for output in outputs]


def used_names(outputs: Sequence[Expr]) -> list[str]:
    """The distinct names that ``outputs`` read, in order of first use."""
    return [node.name for node in postorder(outputs) if isinstance(node, Name)]
