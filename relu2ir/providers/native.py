"""Plain PyTorch: the reference that every other provider is held to, and what runs wherever nothing else can.

The op's Python function is written out by the same emitter as every kernel, so it can be read (`relu2ir show`),
stepped through, and traced by Dynamo, functorch or FX like any user's code.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from relu2ir.ir.emit import Target, emit, used_names
from relu2ir.ir.expr import OPERATORS, Call, Expr, Name, fold, format_number
from relu2ir.ir.primitives import PRIMITIVES, Primitive
from relu2ir.registry import Provider
from relu2ir.spec import Layout, OpSpec, Output

if TYPE_CHECKING:
    import torch


def _called(row: Primitive) -> str:
    keywords = [f"{keyword}={value!r}" for keyword, value in row.keywords.items()]
    return f"{row.torch}({', '.join([*(f'{{{i}}}' for i in range(len(row.args))), *keywords])})"


# Operators, not functions: they take a Python number on either side.
TEMPLATES = (
    {name: _called(row) for name, row in PRIMITIVES.items()}
    | {name: f"{{0}} {symbol} {{1}}" for name, (symbol, _) in OPERATORS.items()}
    | {"neg": "-{0}"}
)
# A choice that depends on params alone is Python's: torch.where takes no Python bool.
BY_NUMBERS = "where by numbers"
TARGET = Target(
    "native",
    TEMPLATES | {BY_NUMBERS: "({1} if {0} else {2})"},
    constant=lambda value: _constant(value),
    statement="    {name} = {value}",
)

_UNPACK = {
    Layout.halves: "    {parts} = {x}.chunk(2, -1)",
    Layout.pairs: "    {parts} = {x}[..., 0::2], {x}[..., 1::2]",
}
_PACK = {
    Layout.plain: "{0}",
    Layout.halves: "torch.cat(({0}, {1}), -1)",
    Layout.pairs: "torch.stack(({0}, {1}), -1).reshape({like}.shape)",  # flatten has no rule for batched gradients
}


def _constant(value: float) -> str:
    # An integer stays one, so that an op over integer tensors keeps their type.
    text = format_number(value) if format_number(value) != "-0" else "-0.0"
    return f"({text})" if text.startswith("-") else text


def source(spec: OpSpec) -> str:
    """The Python function that computes ``spec`` with torch: tensors in order, then params."""
    statements, held = emit(_choosing(spec), TARGET)
    unpack = [
        _UNPACK[input.layout].format(parts=", ".join(input.parts), x=input.name)
        for input in spec.inputs
        if input.layout.packed
    ]
    values, results = iter(held), []
    for output in spec.outputs:
        parts = [_shaped(spec, output, index, next(values)) for index in range(len(output.exprs))]
        results.append(_PACK[output.layout].format(*parts, like=output.name))
    arguments = ", ".join([*(input.name for input in spec.inputs), *spec.params])
    result = f"{spec.inputs[0].name}.copy_({results[0]})" if spec.writes_input else ", ".join(results)
    return "\n".join([f"def {spec.name}({arguments}):", *unpack, *statements, f"    return {result}", ""])


def _choosing(spec: OpSpec) -> list[Expr]:
    """The op's expressions, with each choice that depends on params alone marked as one."""

    def visit(node: Expr, args: list[tuple[Expr, bool]]) -> tuple[Expr, bool]:
        reads = any(below for _, below in args) or (isinstance(node, Name) and node.name in spec.parts)
        if not isinstance(node, Call):
            return node, reads
        by_numbers = node.primitive == "where" and not args[0][1]
        return Call(BY_NUMBERS if by_numbers else node.primitive, tuple(arg for arg, _ in args)), reads

    found = fold(spec.exprs, visit)
    return [found[expr][0] for expr in spec.exprs]


def _shaped(spec: OpSpec, output: Output, index: int, value: str) -> str:
    """``value``, filled out to a tensor where it depends on no input, as ``where(x > 0, y, 1)`` does on x."""
    if set(used_names([output.exprs[index]])) & set(spec.parts):
        return value
    named = (input for input in spec.inputs if input.name == output.name and not input.layout.broadcast)
    like = next((input.parts[index] for input in named), spec.parts[0])
    return f"torch.full_like({like}, {value})"


@cache
def lower(spec: OpSpec) -> Callable[..., Any]:
    """The function of `source`. Differentiable; any dtype, device, subclass or transform that torch takes."""
    import torch

    text, file = source(spec), f"<relu2ir native {spec.qualname} {spec.hash}>"
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(text, file, "exec"), scope)
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    return scope[spec.name]


def _refuses(spec: OpSpec, tensors: Sequence[torch.Tensor]) -> str | None:
    return None


NATIVE = Provider("native", missing=lambda: None, refuses=_refuses, lower=lower, source=source, plain=True)
