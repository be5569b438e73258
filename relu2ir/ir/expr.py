"""Scalar expressions: immutable trees over named values, constants and primitives.

Nodes are interned: two expressions written alike *are* one object, so equality and hashing cost nothing, a shared
sub-expression is shared without being looked for, and every traversal is linear however often a gradient repeats a
term. Traversals are loops over `postorder`, never recursive: depth is the user's, the stack is ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar
from weakref import WeakValueDictionary

_INTERNED: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()
T = TypeVar("T")


class Expr:
    """A node: `Name`, `Const` or `Call`. Built by calling the class; equal nodes are identical."""

    __slots__ = ("__weakref__", "fields")
    fields: tuple[Any, ...]
    args: tuple[Expr, ...] = ()

    def __new__(cls, *fields: Any) -> Any:
        key = (cls, *((field, math.copysign(1.0, field)) if isinstance(field, float) else field for field in fields))
        node = _INTERNED.get(key)
        if node is None:
            node = super().__new__(cls)
            object.__setattr__(node, "fields", fields)
            _INTERNED[key] = node
        return node

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"cannot set '{name}': an expression is shared by all who wrote it; build another one")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.fields

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.fields))})"

    def __str__(self) -> str:
        return format_expr(self)


class Name(Expr):
    """An input (or one part of a packed input) or a param of the op."""

    __slots__ = ()

    @property
    def name(self) -> str:
        return self.fields[0]


class Const(Expr):
    """A number, float64. ``0.0`` and ``-0.0`` are two constants."""

    __slots__ = ()

    def __new__(cls, value: float) -> Const:
        return super().__new__(cls, float(value))

    @property
    def value(self) -> float:
        return self.fields[0]


class Call(Expr):
    """A primitive of the vocabulary applied to expressions: ``Call("square", (Name("x"),))``."""

    __slots__ = ()

    @property
    def primitive(self) -> str:
        return self.fields[0]

    @property
    def args(self) -> tuple[Expr, ...]:  # type: ignore[override]
        return self.fields[1]


# Operators print infix: their symbol and how tightly they bind. `parse.py` reads by the same table.
OPERATORS = {
    "le": ("<=", 1),
    "lt": ("<", 1),
    "ge": (">=", 1),
    "gt": (">", 1),
    "add": ("+", 2),
    "sub": ("-", 2),
    "mul": ("*", 3),
    "div": ("/", 3),
}
NEG_STRENGTH = 4
_ATOM = 5


def postorder(roots: Iterable[Expr]) -> list[Expr]:
    """Every distinct node below ``roots``, arguments before the calls that use them, left to right."""
    order: dict[Expr, None] = {}
    stack = [(root, False) for root in reversed(list(roots))]
    while stack:
        node, ready = stack.pop()
        if node in order:
            continue
        if ready or not node.args:
            order[node] = None
        else:
            stack.append((node, True))
            stack.extend((arg, False) for arg in reversed(node.args))
    return list(order)


def fold(roots: Iterable[Expr], visit: Callable[[Expr, list[T]], T]) -> dict[Expr, T]:
    """Compute ``visit(node, results of its arguments)`` once for every distinct node."""
    results: dict[Expr, T] = {}
    for node in postorder(roots):
        results[node] = visit(node, [results[arg] for arg in node.args])
    return results


def depth(expr: Expr) -> int:
    """How many calls lie on the longest path from ``expr`` down."""
    return fold([expr], lambda node, below: 1 + max(below, default=-1))[expr]


def substitute(expr: Expr, values: Mapping[str, Expr]) -> Expr:
    """The expression with each name that ``values`` knows replaced."""

    def visit(node: Expr, args: list[Expr]) -> Expr:
        if isinstance(node, Name):
            return values.get(node.name, node)
        return Call(node.primitive, tuple(args)) if isinstance(node, Call) else node

    return fold([expr], visit)[expr]


def format_expr(expr: Expr) -> str:
    """Text that parses back to ``expr``."""

    def bracketed(part: tuple[str, int], strength: int) -> str:
        return f"({part[0]})" if part[1] < strength else part[0]

    def visit(node: Expr, args: list[tuple[str, int]]) -> tuple[str, int]:
        if isinstance(node, Name):
            return node.name, _ATOM
        if isinstance(node, Const):
            text = format_number(node.value)
            return text, NEG_STRENGTH if text.startswith("-") else _ATOM
        assert isinstance(node, Call)
        if node.primitive == "neg":
            # "-(2)" negates a constant that "-2" would fold into one.
            number = isinstance(node.args[0], Const)
            return "-" + (f"({args[0][0]})" if number else bracketed(args[0], _ATOM)), NEG_STRENGTH
        if node.primitive in OPERATORS:
            symbol, own = OPERATORS[node.primitive]
            return f"{bracketed(args[0], own)} {symbol} {bracketed(args[1], own + 1)}", own
        return f"{node.primitive}({', '.join(text for text, _ in args)})", _ATOM

    return fold([expr], visit)[expr][0]


def format_number(value: float) -> str:
    """The shortest text that reads back as ``value``: ``2``, ``1.702``, ``-0``."""
    if value.is_integer() and abs(value) < 1e15:
        return "-0" if value == 0 and math.copysign(1.0, value) < 0 else str(int(value))
    return repr(value)
