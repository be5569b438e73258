"""Two loops over strided parts reach exactly the elements that the parts' views hold, each beside its partner."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relu2ir.layout import logical_shape, loops
from relu2ir.spec import Layout


def views(layout, tensor):
    if layout is Layout.plain:
        return [tensor]
    return tensor.chunk(2, -1) if layout is Layout.halves else (tensor[..., 0::2], tensor[..., 1::2])


def partners(nest, tensors):
    """For each step of the loops, the storage element of every part."""
    steps = {(row, col) for row in range(nest.rows) for col in range(nest.cols)}
    return sorted(
        tuple(
            p.first + tensors[p.operand].storage_offset() + row * p.row_stride + col * p.col_stride for p in nest.parts
        )
        for row, col in steps
    )


@st.composite
def arranged(draw, shape):
    """Element numbers of a storage, seen in ``shape`` through any permutation, slice and expansion."""
    order = draw(st.permutations(range(len(shape))))
    margins = [draw(st.integers(0, 2)) for _ in shape]
    steps = [draw(st.integers(1, 2)) for _ in shape]
    expand = [draw(st.integers(0, 4)) == 0 for _ in shape]
    sizes = [1 if expand[d] else margins[d] + shape[d] * steps[d] for d in order]
    storage = torch.arange(torch.Size(sizes).numel()).view(sizes)
    tensor = storage.permute([order.index(d) for d in range(len(shape))])
    for d, size in enumerate(shape):
        tensor = tensor if expand[d] else tensor.narrow(d, margins[d], size * steps[d])
        tensor = tensor[(slice(None),) * d + (slice(None, None, 1 if expand[d] else steps[d]),)]
    return tensor.expand(shape)


@given(st.data())
def test_the_loops_pair_the_elements_of_all_parts(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    layouts = data.draw(st.lists(st.sampled_from(Layout), min_size=1, max_size=2))
    doubled = (*shape[:-1], 2 * shape[-1])
    tensors = [data.draw(arranged(shape if layout is Layout.plain else doubled)) for layout in layouts]
    dense = torch.empty_like(views(layouts[0], tensors[0])[0])
    order = torch.argsort(torch.tensor(dense.stride()), descending=True, stable=True).tolist()
    numbers = torch.arange(dense.numel()).view([shape[d] for d in order])
    tensors.append(numbers.permute([order.index(d) for d in range(len(shape))]))
    layouts.append(Layout.plain)
    nest = loops(layouts, [(tuple(t.shape), t.stride()) for t in tensors])
    if nest is None:
        assert len(shape) > 2
        return
    parts = [view for layout, tensor in zip(layouts, tensors) for view in views(layout, tensor)]
    assert partners(nest, tensors) == sorted(zip(*(part.flatten().tolist() for part in parts)))


@pytest.mark.parametrize(
    ("layout", "shape", "strides", "found"),
    [
        (Layout.plain, (4, 6), (6, 1), (1, 24, True)),
        (Layout.plain, (4, 6), (1, 4), (1, 24, True)),
        (Layout.plain, (), (), (1, 1, True)),
        (Layout.plain, (3, 4, 6), (40, 10, 1), (12, 6, False)),
        (Layout.plain, (4, 6), (0, 0), (1, 24, False)),
        (Layout.halves, (4, 12), (12, 1), (4, 6, False)),
        (Layout.halves, (1, 12), (12, 1), (1, 6, False)),
        (Layout.pairs, (4, 12), (12, 1), (1, 24, False)),
    ],
)
def test_neighbouring_dimensions_become_one(layout, shape, strides, found):
    logical = logical_shape(layout, shape)
    dense = strides if found[2] else torch.empty(logical).stride()
    nest = loops((layout, Layout.plain), ((shape, strides), (logical, dense)))
    assert (nest.rows, nest.cols, nest.flat) == found


def test_more_than_two_loops_are_refused():
    assert loops([Layout.plain] * 2, (((3, 4, 6), (200, 20, 1)), ((3, 4, 6), (24, 6, 1)))) is None


def test_an_odd_or_missing_last_dimension_has_no_halves():
    assert logical_shape(Layout.halves, (4, 5)) is None
    assert logical_shape(Layout.pairs, ()) is None
    assert logical_shape(Layout.halves, (4, 6)) == (4, 3)
