"""Which elements the parts of an operand are, and how few loops visit them all: arithmetic on strides, without torch.

A *part* is what one scalar name of an op reads or writes: a whole tensor when plain, one half or every second element
of a packed one. All parts of a call have one logical shape, so one nest of loops serves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from relu2ir.spec import Layout

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
    """The shape of one part; None when the last dimension cannot be split in two."""
    if layout is Layout.plain:
        return tuple(shape)
    return (*shape[:-1], shape[-1] // 2) if len(shape) > 0 and shape[-1] % 2 == 0 else None


def is_broadcast_to(layout: Layout, shape: Sequence[int], logical: Sequence[int]) -> bool:
    """Whether a `vector` or `scalar` operand of this shape can serve an op of the ``logical`` shape."""
    if layout is Layout.vector:
        return len(logical) > 0 and tuple(shape) == (logical[-1],)
    return tuple(shape) in ((), (1,))


def loops(layouts: Sequence[Layout], places: Sequence[Place]) -> Loops | None:
    """The loops over the operands of these layouts, none empty; None when more than two are needed.

    Dimensions are taken in the memory order of the last operand (an output, so dense), those of size 1 are dropped, and
    neighbours that every part steps through as if they were one become one.
    """
    parts = [(i, *part) for i, layout in enumerate(layouts) for part in _parts(layout, *places[i])]
    shape = logical_shape(layouts[-1], places[-1][0])
    assert shape is not None
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


def _parts(layout: Layout, shape: tuple[int, ...], strides: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
    """The first element and the strides of each part."""
    if layout is Layout.plain:
        return [(0, strides)]
    *outer, step = strides
    if layout is Layout.halves:
        return [(0, strides), (shape[-1] // 2 * step, strides)]
    return [(0, (*outer, 2 * step)), (step, (*outer, 2 * step))]
