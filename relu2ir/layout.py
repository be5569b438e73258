"""Which elements the parts of an operand are, and how few loops visit them all: arithmetic on strides, without torch.

A *part* is what one scalar name of an op reads or writes: a whole tensor when plain, one half or every second element
of a packed one, the same row again and again of a vector. All parts of a call have one logical shape, that of the first
operand, so one nest of loops serves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from relu2ir.spec import Layout, OpSpec

# Where a tensor's elements lie: its shape and its strides (in elements).
Place = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Part:
    """Element ``[row, col]`` of the part stands at ``first + row * row_stride + col * col_stride`` of its tensor."""

    operand: int
    first: int
    row_stride: int
    col_stride: int


@dataclass(frozen=True)
class Loops:
    """Two nested loops over every part, in operand order. ``flat``: each part is one dense run of ``cols`` elements."""

    rows: int
    cols: int
    parts: tuple[Part, ...]

    @cached_property
    def flat(self) -> bool:
        return self.rows == 1 and all(part.first == 0 and part.col_stride == 1 for part in self.parts)


def logical_shape(layout: Layout, shape: Sequence[int]) -> tuple[int, ...] | None:
    """The shape of one part of an operand that is not broadcast; None when its last dimension splits in no two."""
    if not layout.packed:
        return tuple(shape)
    return (*shape[:-1], shape[-1] // 2) if len(shape) > 0 and shape[-1] % 2 == 0 else None


def whole_shape(layout: Layout, logical: Sequence[int]) -> tuple[int, ...]:
    """The shape of an operand of this layout in a call of the ``logical`` shape."""
    if layout.packed:
        return (*logical[:-1], *(2 * size for size in logical[-1:]))
    return {Layout.vector: tuple(logical[-1:]), Layout.scalar: ()}.get(layout, tuple(logical))


def is_broadcast_to(layout: Layout, shape: Sequence[int], logical: Sequence[int]) -> bool:
    """Whether a `vector` or `scalar` operand of this shape can serve an op of the ``logical`` shape."""
    if layout is Layout.vector:
        return len(logical) > 0 and tuple(shape) == (logical[-1],)
    return len(shape) == 0 or (len(logical) > 0 and tuple(shape) == (1,))


def shape_problem(spec: OpSpec, shapes: Sequence[Sequence[int]]) -> str | None:
    """How operands of these shapes break the contract of ``spec``, and what to pass instead; None when they keep it.

    A packed operand has an even last dimension, a vector one element per column of the first operand, a scalar one.
    """
    logical = logical_shape(spec.inputs[0].layout, shapes[0]) or ()
    for input, shape in zip(spec.inputs, shapes):
        layout = input.layout
        if layout is Layout.plain:
            continue
        if layout.packed:
            if logical_shape(layout, shape) is None:
                return (
                    f"reads {layout.value} [{', '.join(input.parts)}] from the last dimension of '{input.name}', "
                    f"which must be even; found shape {list(shape)}. Pass both parts in one tensor."
                )
        elif not is_broadcast_to(layout, shape, logical):
            first = f"'{spec.inputs[0].name}' of shape {list(shapes[0])}"
            if layout is Layout.vector and not logical:
                return f"reads '{input.name}' by the columns of {first}, which has none. Pass at least one dimension."
            what, fit = {
                Layout.vector: ("one element per column", f"shape {list(logical[-1:])}"),
                Layout.scalar: ("one element", "shape [] or [1]" if logical else "shape []"),
            }[layout]
            return f"reads '{input.name}' as {what} beside {first}; found shape {list(shape)}. Pass a tensor of {fit}."
    return None


def kernel_shape_problem(spec: OpSpec, shapes: Sequence[Sequence[int]]) -> str | None:
    """Why no kernel takes operands of these shapes, or None: those in full must agree in logical shape too."""
    problem = shape_problem(spec, shapes)
    if problem is not None:
        return f"it {problem}"
    full = [logical_shape(i.layout, shape) for i, shape in zip(spec.inputs, shapes) if not i.layout.broadcast]
    if all(shape == full[0] for shape in full):
        return None
    return f"its operands differ in shape: {', '.join(str(list(shape or ())) for shape in full)}"


def loops(layouts: Sequence[Layout], places: Sequence[Place]) -> Loops | None:
    """The loops over the operands of these layouts, none empty; None when more than two are needed.

    Scalars are no part of a loop. Dimensions are taken in the memory order of the last operand (an output, so dense),
    those of size 1 are dropped, and neighbours that every part steps through as if they were one become one.
    """
    shape = logical_shape(layouts[-1], places[-1][0])
    assert shape is not None
    parts = [(i, *part) for i, layout in enumerate(layouts) for part in _parts(layout, *places[i], len(shape))]
    order = sorted((d for d, size in enumerate(shape) if size != 1), key=lambda d: parts[-1][2][d], reverse=True)
    nest: list[tuple[int, tuple[int, ...]]] = []
    for d in order:
        size, steps = shape[d], tuple(strides[d] for _, _, strides in parts)
        if nest and all(outer == inner * size for outer, inner in zip(nest[-1][1], steps)):
            nest[-1] = nest[-1][0] * size, steps
        else:
            nest.append((size, steps))
    if len(nest) > 2:
        return None
    if not nest:
        nest = [(1, (1,) * len(parts))]
    if len(nest) == 1:
        # A stride of 0 is known to divide by a vector's length, so the loads of a single row stay wide.
        nest.insert(0, (1, (0,) * len(parts)))
    (rows, row_strides), (cols, col_strides) = nest
    steps_of = zip(parts, row_strides, col_strides)
    return Loops(rows, cols, tuple(Part(i, first, row, col) for (i, first, _), row, col in steps_of))


def _parts(
    layout: Layout, shape: tuple[int, ...], strides: tuple[int, ...], dims: int
) -> list[tuple[int, tuple[int, ...]]]:
    """The first element and the strides of each part, in ``dims`` dimensions."""
    if layout is Layout.plain:
        return [(0, strides)]
    *outer, step = strides
    if layout is Layout.vector:
        return [(0, (0,) * (dims - 1) + (step,))]
    if layout is Layout.halves:
        return [(0, strides), (shape[-1] // 2 * step, strides)]
    return [(0, (*outer, 2 * step)), (step, (*outer, 2 * step))]
