"""The Triton kernels on the CPU, in Triton's interpreter. `test_triton.py` runs this file in a process of its own: a
function that was decorated under TRITON_INTERPRET cannot be compiled.
"""

import math

import pytest
import torch
from expressions import random_ops
from torch._subclasses import FakeTensorMode

from relu2ir import specfile
from relu2ir.ir.emit import expanded
from relu2ir.ir.expr import Call, Const, Expr, Name
from relu2ir.ir.primitives import PRIMITIVES
from relu2ir.layout import logical_shape, loops, whole_shape
from relu2ir.oracle import evaluate, mismatches
from relu2ir.providers import native, triton
from relu2ir.spec import Input, Layout, OpSpec, Output

# The interpreter computes with numpy, which warns where IEEE arithmetic just gives inf or NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

OPS = {
    spec.name: spec
    for spec in specfile.read_text(
        """
        namespace: interpreted
        ops:
          relu_squared: {inputs: [x], expr: square(relu(x))}
          silu_and_mul: {inputs: {x: {halves: [gate, up]}}, expr: silu(gate) * up}
          paired: {inputs: {x: {pairs: [gate, up]}}, params: {top: 0.7}, expr: "where(gate > top, top, gate) * up"}
          weighted: {inputs: [x, y], params: {weight: 0.1}, expr: x * x * x * weight + 1.702 * y}
          biased: {inputs: {x: , bias: vector}, expr: relu(x + bias) * x}
          scaled: {inputs: {x: {pairs: [a, b]}, scale: scalar, bias: vector}, expr: a * scale * b - b * bias}
        """
    ).ops
}
DTYPES = (torch.float32, torch.float16, torch.float64)
SPECIAL = (math.nan, 0.0, -0.0, math.inf, -math.inf, 0.5, -3.0, 1e30, -1e30)


def fill(*shape, dtype):
    return torch.randn(shape, dtype=torch.float64).to(dtype)


# Where an operand lies; each logical shape is even in its last dimension, so that packed inputs can have it too.
PLACES = {
    "contiguous": lambda t: fill(5, 38, dtype=t),
    "one row": lambda t: fill(38, dtype=t),
    "more than a block, odd": lambda t: fill(3, 2050, dtype=t)[:, :].reshape(-1)[: 3 * 2050 - 2],
    "size 1": lambda t: fill(1, 1, 2, dtype=t),
    "empty": lambda t: fill(3, 0, dtype=t),
    "no rows": lambda t: fill(0, 6, dtype=t),
    "transposed": lambda t: fill(38, 5, dtype=t).t(),
    "row slice": lambda t: fill(5, 60, dtype=t)[:, 7:45],
    "every second column": lambda t: fill(5, 76, dtype=t)[:, ::2],
    "expanded rows": lambda t: fill(1, 38, dtype=t).expand(5, 38),
    "expanded columns": lambda t: fill(5, 1, dtype=t).expand(5, 38),
    "three strides": lambda t: fill(4, 6, 40, dtype=t)[:, :5, :38],
    "permuted": lambda t: fill(6, 4, 8, dtype=t).permute(2, 1, 0),
    "permuted slice": lambda t: fill(7, 4, 8, dtype=t).permute(2, 1, 0)[1:, :3, :6],
    "misaligned": lambda t: fill(191, dtype=t)[1:].view(5, 38),
}


def operands(spec, place, dtype):
    """Each full operand at this place; beside them a stepped vector and a scalar of one dimension."""
    columns = logical_shape(spec.inputs[0].layout, PLACES[place](dtype).shape)[-1]
    broadcast = {Layout.vector: fill(2 * columns, dtype=dtype)[::2], Layout.scalar: fill(1, dtype=dtype)}
    return [broadcast.get(input.layout, PLACES[place](dtype)) for input in spec.inputs]


def each(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def rounded_once(spec, tensors, params):
    """What ``spec`` gives when half types are computed in float32."""
    dtype = tensors[0].dtype
    wide = [tensor.float() if dtype == torch.float16 else tensor for tensor in tensors]
    outputs = tuple(output.to(dtype) for output in each(native.lower(spec)(*wide, *params)))
    return outputs if len(outputs) > 1 else outputs[0]


def assert_close(found, expected):
    # A transcendental of float32 may differ by an ulp or two, after which a half may round the other way.
    rtol = {torch.float32: 2e-6, torch.float64: 1e-14, torch.float16: 2e-3}[found.dtype]
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol / 20, equal_nan=True)


@pytest.mark.parametrize(
    ("place", "dtype"),
    [(place, torch.float32) for place in PLACES] + [("misaligned", dtype) for dtype in DTYPES[1:]],
    ids=str,
)
@pytest.mark.parametrize("op", OPS)
def test_forward_and_gradient(op, place, dtype):
    spec = OPS[op]
    tensors = operands(spec, place, dtype)
    params = list(spec.params.values())
    result = triton.lower(spec)(*tensors, *params)
    assert_close(result, rounded_once(spec, tensors, params))
    assert result.stride() == native.lower(spec)(*tensors, *params).stride()
    for grad in fill(*result.shape, dtype=dtype), torch.ones((), dtype=dtype).expand(result.shape):
        found = each(triton.lower(spec.backward)(grad, *tensors, *params))
        expected = each(rounded_once(spec.backward, (grad, *tensors), params))
        assert len(found) == len(expected) == len(spec.backward.outputs)
        for one, other in zip(found, expected):
            assert_close(one, other)


def test_scalars():
    for value in (3.0, -2.0):
        x = torch.tensor(value)
        assert triton.lower(OPS["relu_squared"])(x).equal(x.relu().square())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_relu_squared_keeps_every_bit(dtype):
    finfo, integer = torch.finfo(dtype), {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    x = torch.tensor([*SPECIAL, finfo.tiny, finfo.smallest_normal / 2, finfo.max, -finfo.max], dtype=torch.float64)
    x = torch.cat([x.to(dtype), torch.arange(-9, 10).to(integer).view(dtype), fill(400, dtype=dtype)])
    expected, found = torch.square(torch.relu(x)), triton.lower(OPS["relu_squared"])(x)
    nan = expected.isnan()
    assert found.isnan().equal(nan)
    assert found[~nan].view(integer).equal(expected[~nan].view(integer))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_gradient_of_relu_squared_keeps_nan_and_zeros(dtype):
    x = torch.tensor(SPECIAL, dtype=dtype)
    grad = torch.full_like(x, 2.0)
    expected = native.lower(OPS["relu_squared"].backward)(grad, x)
    found = triton.lower(OPS["relu_squared"].backward)(grad, x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert found[0].isnan(), "the gradient at NaN is NaN"


def test_half_types_round_once_at_the_store():
    x, y = fill(4096, dtype=torch.float16), fill(4096, dtype=torch.float16)
    found = triton.lower(OPS["weighted"])(x, y, 0.1)
    assert found.equal(rounded_once(OPS["weighted"], (x, y), (0.1,)))
    assert not found.equal(native.lower(OPS["weighted"])(x, y, 0.1)), "plain PyTorch rounds after every operation"


def test_float64_constants_and_params_are_exact():
    x, y = fill(512, dtype=torch.float64), fill(512, dtype=torch.float64)
    assert triton.lower(OPS["weighted"])(x, y, 0.3).equal(x * x * x * 0.3 + 1.702 * y)
    # Where no operator gives a number the other side's type.
    bare = specfile.read_text("ops: {bare: {inputs: [x, y], expr: 'where(x > y, 0.1, 1.702 / y)'}}").ops[0]
    expected = torch.where(x > y, 0.1, torch.full_like(y, 1.702) / y)
    assert triton.lower(bare)(x, y).equal(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("primitive", [name for name, row in PRIMITIVES.items() if not row.is_condition])
def test_a_primitive_is_its_torch_function(primitive, dtype):
    row = PRIMITIVES[primitive]
    args: tuple[Expr, ...] = tuple(map(Name, ("a", "b")[: len(row.args) - len(row.numbers)]))
    args += (Const(-0.5), Const(1.25))[: len(row.numbers)]
    if primitive == "where":
        args = (Call("lt", (Name("a"), Name("b"))), *args)
    inputs = (Input("a", parts=("a",)), Input("b", parts=("b",)))[: len(row.args)]
    spec = OpSpec("interpreted", f"only_{primitive}", inputs, (Output("out", Layout.plain, (Call(primitive, args),)),))
    values = torch.tensor([*SPECIAL, *torch.randn(20)], dtype=dtype)
    operands = [t.contiguous() for t in torch.meshgrid(values, values, indexing="ij")][: len(spec.inputs)]
    # By float64: torch's own float32 square root is not always the nearest number (MKL).
    (expr,) = expanded(spec.exprs)
    wide = evaluate(expr, {"a": operands[0].double(), "b": operands[-1].double()}, torch.float64)
    found, expected = triton.lower(spec)(*operands), wide.to(dtype)
    exact = dtype == torch.float32 and (row.correctly_rounded or primitive == "sqrt")
    rtol = 0 if exact else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=rtol, atol=0, equal_nan=True)
    if primitive in ("neg", "add", "sub", "mul", "div"):
        assert found.signbit()[~expected.isnan()].equal(expected.signbit()[~expected.isnan()])


@pytest.mark.parametrize("condition", [name for name, row in PRIMITIVES.items() if row.is_condition])
def test_a_condition_is_its_torch_function(condition):
    a, b = Name("a"), Name("b")
    spec = OpSpec("interpreted", f"only_{condition}", (Input("a", parts=("a",)), Input("b", parts=("b",))),
                  (Output("out", Layout.plain, (Call("where", (Call(condition, (a, b)), a, b)),)),))  # fmt: skip
    operands = [t.contiguous() for t in torch.meshgrid(*[torch.tensor(SPECIAL)] * 2, indexing="ij")]
    expected = torch.where(getattr(torch, condition)(*operands), *operands)
    torch.testing.assert_close(triton.lower(spec)(*operands), expected, rtol=0, atol=0, equal_nan=True)


def test_columns_beyond_one_grid_axis_fold_onto_the_next(monkeypatch):
    monkeypatch.setattr(triton, "MAX_BLOCKS", 2)
    assert triton.grid(3, 4500) == ((3, 2, 3), 1, 1024)
    x = fill(3, 9000, dtype=torch.float32)
    found = triton.lower(OPS["silu_and_mul"])(x)
    assert_close(found, rounded_once(OPS["silu_and_mul"], (x,), ()))


def test_offsets_beyond_2_to_the_31_are_read_in_place(tmp_path):
    # A sparse file: 6 GB of addresses, a few pages of memory. Strides fit 32 bits, offsets do not.
    apart = 2**30 + 1024
    storage = torch.from_file(str(tmp_path / "sparse"), shared=True, size=3 * apart + 64, dtype=torch.float16)
    x = storage.as_strided((4, 64), (apart, 1))
    x.copy_(fill(4, 64, dtype=torch.float16))
    assert loops([Layout.plain] * 2, ((x.shape, x.stride()), (x.shape, (64, 1)))).rows == 4
    for operand in (x, x.t()):
        assert triton.lower(OPS["relu_squared"])(operand).equal(operand.relu().square())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("op", OPS)
def test_a_fake_call_has_the_real_calls_shapes_and_strides(op, place):
    for spec in OPS[op].with_gradients:
        tensors = operands(OPS[op], place, torch.float32)
        if spec.forward is not None:
            tensors.insert(0, triton.lower(spec.forward)(*tensors, *spec.params.values()))
        triton.lower(spec)
        kernel = getattr(torch.ops.interpreted_triton, spec.name).kernel
        real = kernel(*tensors, *spec.params.values())
        with FakeTensorMode() as mode:
            fake = kernel(*map(mode.from_tensor, tensors), *spec.params.values())
        for one, other in zip(each(real), each(fake)):
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


@pytest.mark.parametrize("op", OPS)
def test_the_ops_of_graphs_pass_opcheck(op):
    spec = OPS[op]
    triton.lower(spec)
    tensors = [fill(*whole_shape(input.layout, (3, 4)), dtype=torch.float32) for input in spec.inputs]
    torch.library.opcheck(getattr(torch.ops.interpreted_triton, op).kernel, (*tensors, *spec.params.values()))


def test_another_definition_under_a_known_name_takes_its_op_over():
    one, other = (
        specfile.read_text(f"namespace: interpreted\nops: {{twice: {{inputs: [x], expr: {expr}}}}}").ops[0]
        for expr in ("x + x", "square(x)")
    )
    x = torch.tensor([3.0])
    for spec, expected in ((one, 6.0), (other, 9.0), (one, 6.0)):
        assert triton.lower(spec)(x).item() == expected
        assert torch.ops.interpreted_triton.twice.kernel(x).item() == expected


def test_the_interpreter_takes_cpu_tensors_but_not_bfloat16():
    spec = OPS["relu_squared"]
    assert triton.TRITON.missing() is None
    assert triton.TRITON.refuses(spec, [torch.zeros(2)]) is None
    reason = "Triton's interpreter truncates float32 to bfloat16 instead of rounding"
    assert triton.TRITON.refuses(spec, [torch.zeros(2, dtype=torch.bfloat16)]) == reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("spec", random_ops(25), ids=lambda spec: spec.name)
def test_a_random_expression_and_its_gradient(spec, dtype):
    x, y = fill(300, dtype=dtype), fill(300, dtype=dtype)
    for op, tensors in (spec, (x, y)), (spec.backward, (torch.ones_like(x), x, y)):
        assert mismatches(op, tensors, each(triton.lower(op)(*tensors))) == []
        native_results = each(native.lower(op)(*tensors))
        assert mismatches(op, tensors, native_results, dtype) == []
