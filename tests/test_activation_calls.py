"""How the ops of ops.yaml are called, and how far a float32 result may be from the exact one."""

from __future__ import annotations

import copy
import math
import pickle
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from test_activations import OPS, REFERENCES, ROOT, function, gelu_tanh, operands

import relu2ir
from relu2ir import nn
from relu2ir.ir.emit import expanded
from relu2ir.ir.parse import parse
from relu2ir.oracle import evaluate, packed, scalars, ulp
from relu2ir.spec import Layout, OpSpec

PACKED = [name for name, spec in OPS.items() if spec.inputs[0].layout.packed]
LAYERS = {
    **{"relu_squared": "ReLUSquared", "silu": "SiLU", "gelu": "GELU", "gelu_tanh": "GELUTanh", "gelu_new": "GELUNew"},
    **{"gelu_fast": "GELUFast", "gelu_quick": "GELUQuick", "softplus": "Softplus", "mish": "Mish"},
    **{"hardswish": "Hardswish", "star_relu": "StarReLU", "xielu": "XIELU"},
    **{"silu_and_mul": "SiLUAndMul", "mul_and_silu": "MulAndSiLU", "gelu_and_mul": "GELUAndMul"},
    **{"gelu_tanh_and_mul": "GELUTanhAndMul", "relu_squared_and_mul": "ReLUSquaredAndMul"},
    **{"fatrelu_and_mul": "FATReLUAndMul", "silu_and_mul_clamp": "SiLUAndMulClamp"},
    **{"swiglustep_and_mul": "SwigluStepAndMul", "situ_and_mul": "SiTUAndMul", "swigluoai_and_mul": "SwigluOAIAndMul"},
    **{"silu_mul": "SiLUMul", "gelu_mul": "GELUMul", "gelu_tanh_mul": "GELUTanhMul"},
    **{"relu_squared_mul": "ReLUSquaredMul", "relu_mul": "ReLUMul"},
    **{"bias_relu_squared": "BiasReLUSquared", "bias_gelu": "BiasGELU"},
}
PARAMS = {
    "star_relu": {"scale": 0.8944, "bias": -0.4472},
    "xielu": {"beta": 0.5, "eps": -1e-6},
    "fatrelu_and_mul": {"threshold": 0.0},
    "silu_and_mul_clamp": {"limit": 7.0, "alpha": 1.0, "beta": 0.0},
    "swiglustep_and_mul": {"limit": 7.0},
    "situ_and_mul": {"beta": 4.0, "linear_beta": 25.0},
    "swigluoai_and_mul": {"alpha": 1.702, "limit": 7.0},
}

# ** errors of float32 **


@cache
def dense(name: str) -> tuple[torch.Tensor, ...]:
    """401 values between -40 and 40, closer near 0, in every combination of the op's parts."""
    steps = torch.linspace(-1, 1, 401, dtype=torch.float64)
    return tuple(operands(OPS[name], torch.float32, (40 * steps**3).tolist()))


def computed(spec: OpSpec, tensors: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
    """The result as a kernel computes it, by torch's functions."""
    (expr,) = expanded(spec.exprs)
    return evaluate(expr, scalars(spec, tensors, dtype), dtype)


# The size of the largest term, of which 3 ulp are allowed where terms cancel: 1 + tanh(x), scale * y + bias,
# expm1(x) - x.
LARGEST_TERM = {
    "gelu_new": torch.abs,
    "gelu_fast": torch.abs,
    "star_relu": lambda x: x * x + 0.4472,
    "xielu": lambda x, *_: x * x + x.abs(),
}


def misses(name: str, got: torch.Tensor) -> torch.Tensor:
    """By how much a result is farther off than its op may be. From 2**-100 down exp and erfc may underflow."""
    exact, wide = computed(OPS[name], dense(name), torch.float64), [tensor.double() for tensor in dense(name)]
    allowed = torch.maximum(2 * ulp(exact, got.dtype), exact.abs() * OPS[name].tolerance.get("float32", 0.0))
    if name in LARGEST_TERM:
        allowed += 3 * ulp(LARGEST_TERM[name](*wide), got.dtype)
    return (got.double() - exact).abs() - torch.where(exact.abs() < 2.0**-100, 2.0**-100, allowed)


@pytest.mark.parametrize("name", OPS)
def test_a_float32_result_is_within_2_ulp_or_the_declared_tolerance(name):
    assert misses(name, computed(OPS[name], dense(name), torch.float32)).max() <= 0


@pytest.mark.needs("cpp")
@pytest.mark.parametrize("name", OPS)
def test_a_compiled_float32_result_is_within_2_ulp_or_the_declared_tolerance(name):
    assert misses(name, function(name)(*dense(name), provider="cpp")).max() <= 0


FAR_OUT = {  # with the largest error of each in float32, in ulp
    "sigmoid": (torch.sigmoid, 2.0),
    "tanh": (torch.tanh, 2.0),
    "softplus": (F.softplus, 2.0),
    "silu": (F.silu, 3.0),
    "mish": (F.mish, 4.0),
    "gelu": (F.gelu, 200.0),
    "gelu_tanh": (gelu_tanh, 220.0),
}
SIDES = [0.0, 1e-38, 1e-30, 1e-3, 1.0, 5.5, 9.0, 12.0, 20.0, 20.5, 80.0, 88.0, 88.8, 100.0, 1e4, 3.4028234e38, math.inf]


@pytest.mark.parametrize("name", FAR_OUT)
def test_stable_forms_neither_overflow_nor_lose_digits_far_out(name):
    torchs, ulps = FAR_OUT[name]
    expr = expanded([parse(str(OPS[name].expr) if name in OPS else f"{name}(x)")])[0]
    x = torch.tensor([*SIDES, *(-side for side in SIDES), math.nan])
    got, exact = evaluate(expr, {"x": x}, x.dtype), evaluate(expr, {"x": x.double()}, torch.float64)
    # 2**-140: where exp or erfc is subnormal, a few units of that.
    allowed = exact.abs().nan_to_num(0, 0, 0) * torch.finfo(x.dtype).eps * ulps + 2.0**-140
    same = (got == exact.float()) | (got.isnan() & exact.isnan())
    assert (same | ((got - exact).abs() <= allowed)).all(), (x, got, exact)
    # To what torch's own float64 function has, cancellation and its softplus, x from 20 on, aside.
    torch.testing.assert_close(exact, torchs(x.double()), rtol=1e-8, atol=1e-8, equal_nan=True)


# ** operands **


@pytest.mark.parametrize("name", PACKED)
def test_an_odd_last_dimension_is_an_error_that_names_the_op_and_the_shape(name):
    (operand,) = OPS[name].inputs
    parts = f"{operand.layout.value} [{', '.join(operand.parts)}] from the last dimension of 'x'"
    message = f"relu2ir::{name} reads {parts}, which must be even; found shape [2, 5]. Pass both parts in one tensor."
    with pytest.raises(ValueError) as caught:
        function(name)(torch.ones(2, 5))
    assert str(caught.value) == message


@pytest.mark.parametrize("name", OPS)
def test_strided_and_sliced_operands_give_what_dense_ones_give(name):
    spec = OPS[name]
    tensors = operands(spec, torch.float64)
    expected = function(name)(*tensors)
    for place in (every_second, transposed):
        moved = [place(tensor) if tensor.dim() == 2 else tensor for tensor in tensors]
        # torch's vectorized loops and its scalar ones differ by a few ulp.
        torch.testing.assert_close(function(name)(*moved), expected, rtol=1e-13, atol=1e-15)


def every_second(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in every second column of the middle rows of a wider tensor of noise."""
    rows, columns = tensor.shape
    wide = torch.full((rows + 2, 2 * columns), 123.0, dtype=tensor.dtype)
    wide[1:-1, ::2] = tensor
    return wide[1:-1, ::2]


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous().t()


@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6)])
@pytest.mark.parametrize("name", OPS)
def test_any_number_of_dimensions(name, shape):
    spec = OPS[name]
    single = {Layout.vector: shape[-1:], Layout.scalar: (1,)}
    tensors = [torch.randn(single.get(input.layout, shape), dtype=torch.float64) for input in spec.inputs]
    got = function(name)(*tensors)
    assert got.shape == ((*shape[:-1], 3) if name in PACKED else shape)
    torch.testing.assert_close(got, REFERENCES[name](*tensors, **spec.params), rtol=1e-12, atol=1e-14)


def test_a_scalar_may_have_no_dimension():
    x, alpha = torch.randn(4, 3, dtype=torch.float64), torch.tensor(0.25, dtype=torch.float64)
    assert torch.equal(relu2ir.ops.xielu(x, alpha, alpha), relu2ir.ops.xielu(x, alpha[None], alpha[None]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("name", [name for name, spec in OPS.items() if not spec.params])
def test_integers_do_what_pytorch_does(name, dtype):
    spec = OPS[name]
    tensors = [packed(input.layout, [torch.tensor([0, 1, 2]).to(dtype)] * len(input.parts)) for input in spec.inputs]
    try:
        expected = REFERENCES[name](*tensors)
    except (RuntimeError, NotImplementedError) as error:
        with pytest.raises(type(error)):
            function(name)(*tensors)
    else:
        got = function(name)(*tensors)
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", ["silu_mul", "relu_squared_mul", "relu_mul", "bias_relu_squared"])
def test_mixed_dtypes_promote_as_pytorch_does(name):
    tensors = operands(OPS[name], torch.float32)
    tensors[0] = tensors[0].bfloat16()
    expected = REFERENCES[name](*tensors)
    assert expected.dtype == torch.float32
    torch.testing.assert_close(function(name)(*tensors), expected)


# ** params and layers **


def test_params_are_keywords_with_the_defaults_of_the_field():
    declared = {
        name: {
            a.name: a.default_value for a in getattr(torch.ops.relu2ir, name).default._schema.arguments if a.kwarg_only
        }
        for name in OPS
    }
    assert {name: params for name, params in declared.items() if params} == PARAMS


@pytest.mark.parametrize("name", PARAMS)
def test_a_param_is_any_python_number_and_a_wrong_name_is_an_error(name):
    tensors = operands(OPS[name], torch.float64)
    for param, default in PARAMS[name].items():
        by_default = function(name)(*tensors)
        assert torch.equal(function(name)(*tensors, **{param: default}), by_default)
        assert torch.equal(function(name)(*tensors, **{param: 2}), function(name)(*tensors, **{param: 2.0}))
        assert not torch.equal(function(name)(*tensors, **{param: 2}), by_default)
    with pytest.raises(TypeError, match=f"{name} takes .*found .*limits"):
        function(name)(*tensors, limits=2.0)


@pytest.mark.parametrize("name", OPS)
def test_a_layer_is_named_as_the_field_writes_it_and_survives_pickling_and_copying(name):
    layer = getattr(nn, LAYERS[name])(**dict.fromkeys(PARAMS.get(name, {}), 2.0))
    tensors = operands(OPS[name], torch.float64)
    expected = function(name)(*tensors, **layer.params)
    for each in (layer, pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert type(each).__name__ == LAYERS[name]
        assert each.params == layer.params == dict.fromkeys(PARAMS.get(name, {}), 2.0)
        assert torch.equal(each(*tensors), expected)


def test_every_op_has_its_row_in_the_readme():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in OPS if f"\n| `{name}` | " not in text] == []
