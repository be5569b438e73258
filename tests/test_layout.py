"""Two loops over strided parts reach exactly the elements that the parts' views hold, each beside its partner."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relu2ir import specfile
from relu2ir.layout import is_broadcast_to, kernel_shape_problem, logical_shape, loops, shape_problem, whole_shape
from relu2ir.spec import Layout

FULL = [Layout.plain, Layout.halves, Layout.pairs]


def views(layout, tensor, shape):
    if layout is Layout.plain:
        return [tensor]
    if layout is Layout.vector:
        return [tensor.expand(shape)]
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
    others = st.lists(st.sampled_from([*FULL, Layout.vector]), max_size=2)
    layouts = [data.draw(st.sampled_from(FULL)), *data.draw(others)]
    tensors = [data.draw(arranged(whole_shape(layout, shape))) for layout in layouts]
    dense = torch.empty_like(views(layouts[0], tensors[0], shape)[0])
    order = torch.argsort(torch.tensor(dense.stride()), descending=True, stable=True).tolist()
    numbers = torch.arange(dense.numel()).view([shape[d] for d in order])
    tensors.append(numbers.permute([order.index(d) for d in range(len(shape))]))
    layouts.append(Layout.plain)
    nest = loops(layouts, [(tuple(t.shape), t.stride()) for t in tensors])
    if nest is None:
        assert len(shape) > 2
        return
    parts = [view for layout, tensor in zip(layouts, tensors) for view in views(layout, tensor, shape)]
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


def test_a_vector_makes_rows_and_columns_of_a_dense_operand_and_is_flat_in_one_row():
    layouts = [Layout.plain, Layout.vector, Layout.plain]
    nest = loops(layouts, (((2, 3, 6), (18, 6, 1)), ((6,), (1,)), ((2, 3, 6), (18, 6, 1))))
    assert (nest.rows, nest.cols, nest.flat) == (6, 6, False)
    assert [(part.row_stride, part.col_stride) for part in nest.parts] == [(6, 1), (0, 1), (6, 1)]
    for shape in ((6,), (1, 6)):
        nest = loops(layouts, ((shape, (6, 1)[-len(shape) :]), ((6,), (1,)), (shape, (6, 1)[-len(shape) :])))
        assert (nest.rows, nest.cols, nest.flat) == (1, 6, True)


def test_a_vector_follows_the_last_dimension_whatever_the_memory_order():
    nest = loops([Layout.plain, Layout.vector, Layout.plain], (((4, 6), (1, 4)), ((6,), (2,)), ((4, 6), (1, 4))))
    assert (nest.rows, nest.cols) == (6, 4)
    assert [(part.row_stride, part.col_stride) for part in nest.parts] == [(4, 1), (2, 0), (4, 1)]


def test_more_than_two_loops_are_refused():
    assert loops([Layout.plain] * 2, (((3, 4, 6), (200, 20, 1)), ((3, 4, 6), (24, 6, 1)))) is None


def test_an_odd_or_missing_last_dimension_has_no_halves():
    assert logical_shape(Layout.halves, (4, 5)) is None
    assert logical_shape(Layout.pairs, ()) is None
    assert logical_shape(Layout.halves, (4, 6)) == (4, 3)


@pytest.mark.parametrize(
    ("layout", "shape", "logical", "fits"),
    [
        (Layout.vector, (6,), (4, 6), True),
        (Layout.vector, (6,), (6,), True),
        (Layout.vector, (0,), (3, 0), True),
        (Layout.vector, (4,), (4, 6), False),
        (Layout.vector, (1,), (4, 6), False),
        (Layout.vector, (1, 6), (4, 6), False),
        (Layout.vector, (), (), False),
        (Layout.scalar, (), (), True),
        (Layout.scalar, (), (4, 6), True),
        (Layout.scalar, (1,), (4, 0), True),
        (Layout.scalar, (1,), (), False),  # the result would have a dimension
        (Layout.scalar, (1, 1), (4, 6), False),
        (Layout.scalar, (6,), (4, 6), False),
    ],
)
def test_which_operands_fit_a_broadcast_input(layout, shape, logical, fits):
    assert is_broadcast_to(layout, shape, logical) is fits
    if fits:
        assert torch.empty(shape).expand(logical).shape == logical


GATED = specfile.read_text(
    "ops: {gated: {inputs: {x: {halves: [a, b]}, y: , bias: vector, scale: scalar}, expr: a * b * scale + bias + y}}"
).ops[0]


@pytest.mark.parametrize(
    ("shapes", "problem"),
    [
        (((4, 6), (4, 3), (3,), (1,)), None),
        (((4, 5), (4, 3), (3,), ()), "reads halves [a, b] from the last dimension of 'x', which must be even; "
         "found shape [4, 5]. Pass both parts in one tensor."),
        (((4, 6), (4, 3), (6,), ()), "reads 'bias' as one element per column beside 'x' of shape [4, 6]; "
         "found shape [6]. Pass a tensor of shape [3]."),
        (((4, 6), (4, 3), (3,), (2,)), "reads 'scale' as one element beside 'x' of shape [4, 6]; "
         "found shape [2]. Pass a tensor of shape [] or [1]."),
    ],
)  # fmt: skip
def test_what_breaks_the_contract_is_said_with_what_to_pass(shapes, problem):
    assert shape_problem(GATED, shapes) == problem
    assert kernel_shape_problem(GATED, shapes) == (problem and f"it {problem}")


def test_without_dimensions_there_is_no_vector_and_no_scalar_with_one():
    plain = specfile.read_text("ops: {f: {inputs: {x: , bias: vector, scale: scalar}, expr: x * scale + bias}}").ops[0]
    assert shape_problem(plain, ((), (), ())) == (
        "reads 'bias' by the columns of 'x' of shape [], which has none. Pass at least one dimension."
    )
    scaled = specfile.read_text("ops: {f: {inputs: {x: , scale: scalar}, expr: x * scale}}").ops[0]
    assert shape_problem(scaled, ((), (1,))).endswith("found shape [1]. Pass a tensor of shape [].")


def test_kernels_broadcast_no_other_operand():
    shapes = ((4, 6), (1, 3), (3,), ())
    assert shape_problem(GATED, shapes) is None, "plain PyTorch takes it"
    assert kernel_shape_problem(GATED, shapes) == "its operands differ in shape: [4, 3], [1, 3]"
