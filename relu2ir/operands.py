"""The operands of the backend matrix: every way in which tensors lie in memory, and the values where ops turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from relu2ir.layout import whole_shape
from relu2ir.oracle import packed, smallest
from relu2ir.spec import Layout, OpSpec


@dataclass(frozen=True)
class Arrangement:
    """``place`` takes dense values elsewhere, ``shape`` is the op's logical one: a packed input's is twice as wide."""

    name: str
    shape: tuple[int, ...]
    place: Callable[[torch.Tensor], torch.Tensor] = lambda values: values
    mixed: bool = False  # whether one operand is also so arranged beside dense ones
    layout: Layout | None = None  # whether only operands of this layout are so arranged, each beside dense ones


def _window(values: torch.Tensor, *index: slice, sizes: Sequence[int]) -> torch.Tensor:
    """``values`` as the window ``index`` of a larger buffer; around it stands what shows when it is read."""
    buffer = torch.full(tuple(sizes), 123.0, dtype=values.dtype, device=values.device)
    buffer[index].copy_(values)
    return buffer[index]


def _columns(values: torch.Tensor, first: int) -> torch.Tensor:
    rows, columns = values.shape
    return _window(values, slice(None), slice(first, first + columns), sizes=(rows, 2 * columns + first))


def _every_second(values: torch.Tensor, dims: Collection[int]) -> torch.Tensor:
    index = [slice(None, None, 2 if dim in dims else 1) for dim in range(values.dim())]
    sizes = [2 * size if dim in dims else size for dim, size in enumerate(values.shape)]
    return _window(values, *index, sizes=sizes)


def arrangements(many: int) -> list[Arrangement]:
    """All of them, dense first; the largest have about ``many`` elements."""
    return [
        Arrangement("contiguous", (5, 36)),
        Arrangement("odd sizes", (3, 37)),
        Arrangement("one element", (1,)),
        Arrangement("size-1 dimensions", (1, 7, 1)),
        Arrangement("0-d", ()),
        Arrangement("empty", (0,)),
        Arrangement("empty rows", (3, 0)),
        Arrangement("no rows", (0, 4)),
        Arrangement("many blocks", (many,)),
        Arrangement("many sliced rows", (many // 65, 65), lambda v: _columns(v, 0)),
        Arrangement("transposed", (33, 18), lambda v: v.t().contiguous().t(), mixed=True),
        Arrangement("permuted", (4, 5, 6), lambda v: v.permute(2, 0, 1).contiguous().permute(1, 2, 0)),
        Arrangement("channels last", (2, 3, 4, 6), lambda v: v.contiguous(memory_format=torch.channels_last)),
        Arrangement("row-sliced", (50, 32), lambda v: _columns(v, 0)),
        Arrangement("row-sliced, odd, misaligned", (50, 37), lambda v: _columns(v, 3), mixed=True),
        Arrangement("strided", (17, 19), lambda v: _every_second(v, (1,)), mixed=True),
        Arrangement("every second row", (17, 32), lambda v: _every_second(v, (0,))),
        Arrangement("strided in every dimension", (4, 6, 8), lambda v: _every_second(v, (0, 1, 2))),
        Arrangement("expanded rows", (6, 34), lambda v: v[:1].expand(v.shape), mixed=True),
        Arrangement("expanded columns", (6, 34), lambda v: v[:, :1].expand(v.shape)),
        Arrangement("overlapping", (20, 6), lambda v: v.flatten().as_strided(v.shape, (1, 1))),
        Arrangement("misaligned", (4099,), lambda v: _window(v, slice(1, None), sizes=(v.shape[0] + 1,)), mixed=True),
        Arrangement("stepped", (5, 36), lambda v: _every_second(v, (0,)), layout=Layout.vector),
        Arrangement("expanded", (5, 36), lambda v: v[:1].expand(v.shape), layout=Layout.vector),
        Arrangement("misaligned", (3, 40), lambda v: _window(v, slice(3, None), sizes=(43,)), layout=Layout.vector),
        Arrangement("of one dimension", (5, 36), lambda v: v[None], layout=Layout.scalar),
        Arrangement("strided and transposed", (33, 18), lambda v: _every_second(v.t(), (1,)).t()),
    ]


# Elements of the largest inputs: enough for a parallel loop to use a second thread, and for all triples of specials.
MANY = 35_001
# Enough for an op whose loops another op's cells have been through.
BRIEF = ("contiguous", "odd sizes", "row-sliced, odd, misaligned")


def special_values(dtype: torch.dtype) -> list[float]:
    """NaN, both zeros, both infinities, subnormals, the largest, and values around which an op turns."""
    info = torch.finfo(dtype)
    one_sided = [0.0, math.inf, smallest(dtype), info.smallest_normal, info.max, 1.0, 0.7, 3.0]
    # float16: from 32768 on twice x overflows; -1.2785: silu's lowest point; 88.8 and 709.8: exp overflows.
    one_sided += [x for x in (1.2785, 12.5, 88.8, 709.8, 32768.0) if x <= info.max]
    return [math.nan, *one_sided, *(-x for x in one_sided)]


def inputs(
    spec: OpSpec, dtype: torch.dtype, device: torch.device, many: int = MANY, brief: bool = False
) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Named lists of the op's tensors: each arrangement for all operands, some for one alone, and special values.

    ``brief`` leaves out all arrangements but `BRIEF`.
    """
    generator = torch.Generator().manual_seed(0)

    def tensor(layout: Layout, arrangement: Arrangement, shape: tuple[int, ...]) -> torch.Tensor:
        values = torch.randn(whole_shape(layout, shape), generator=generator, dtype=torch.float64) * 3
        return arrangement.place(values.to(device, dtype))

    plain, *_ = arrangements(many)
    layouts = [input.layout for input in spec.inputs]
    for arrangement in arrangements(many):
        if brief and arrangement.name not in BRIEF:
            continue
        if not arrangement.shape and {Layout.halves, Layout.pairs, Layout.vector}.intersection(layouts):
            continue  # there is no last dimension
        if arrangement.layout is None:
            full = [i for i, layout in enumerate(layouts) if not layout.broadcast]
            placed = [full, *([i] for i in full if arrangement.mixed and len(layouts) > 1)]
        else:
            placed = [[i] for i, layout in enumerate(layouts) if layout is arrangement.layout]
        for where in placed:
            names = ", ".join(spec.inputs[i].name for i in where)
            yield (
                f"{arrangement.name} ({names})",
                [
                    tensor(layout, arrangement if i in where else plain, arrangement.shape)
                    for i, layout in enumerate(layouts)
                ],
            )
    yield from _special_inputs(spec, dtype, device, many, generator)


def _special_inputs(
    spec: OpSpec, dtype: torch.dtype, device: torch.device, many: int, generator: torch.Generator
) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Combinations of special values: of the parts along rows, of vectors along columns, of scalars call by call."""
    values = torch.tensor(special_values(dtype), dtype=dtype)
    parts = {layout: sum(len(i.parts) for i in spec.inputs if i.layout is layout) for layout in Layout}
    scalars, vectors = parts.pop(Layout.scalar), parts.pop(Layout.vector)

    def combinations(count: int, most: int) -> Iterator[torch.Tensor]:
        """For each of ``count`` names its values in all combinations, or in ``most`` of them."""
        total = len(values) ** count
        chosen = torch.arange(total) if total <= most else torch.randint(total, (most,), generator=generator)
        return iter([values[chosen // len(values) ** i % len(values)] for i in range(count)])

    calls = list(zip(*combinations(scalars, len(values)))) if scalars else [()]
    for call in calls:
        columns = list(combinations(vectors, len(values)))
        rows = combinations(sum(parts.values()), many // len(calls) // (len(columns[0]) if columns else 1))
        of_call, of_columns, tensors = iter(call), iter(columns), []
        for input in spec.inputs:
            if input.layout is Layout.scalar:
                tensors.append(next(of_call))
            elif input.layout is Layout.vector:
                tensors.append(next(of_columns))
            else:
                taken = [next(rows) for _ in input.parts]
                spread = [v[:, None].expand(-1, len(columns[0])) if columns else v for v in taken]
                tensors.append(packed(input.layout, spread))
        scalar = f" beside {', '.join(f'{value:g}' for value in call)}" if call else ""
        yield f"special values{scalar}", [tensor.to(device).contiguous() for tensor in tensors]
