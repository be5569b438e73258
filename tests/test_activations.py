"""Every op of ops.yaml is the activation that its name says: against torch, transformers and the published formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import relu2ir
from relu2ir import specfile
from relu2ir.oracle import packed
from relu2ir.providers.native import lower
from relu2ir.spec import Layout, OpSpec

ROOT = Path(__file__).parents[1]

# ** what each op means **

Reference = Callable[..., torch.Tensor]
gelu_tanh = partial(F.gelu, approximate="tanh")


def of_halves(formula: Reference) -> Reference:
    return lambda x, **params: formula(*x.chunk(2, -1), **params)


def gelu_new(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu_fast(x):
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def star_relu(x, scale, bias):
    return scale * F.relu(x) ** 2 + bias


def xielu(x, alpha_p, alpha_n, beta, eps):
    positive, negative = F.softplus(alpha_p), beta + F.softplus(alpha_n)
    below = torch.expm1(torch.minimum(x, torch.tensor(eps, dtype=x.dtype))) - x
    return torch.where(x > 0, positive * x * x + beta * x, below * negative + beta * x)


def clamped(gate, up, limit):
    return gate.clamp(max=limit), up.clamp(min=-limit, max=limit)


def silu_and_mul_clamp(gate, up, limit, alpha, beta):
    gate, up = clamped(gate, up, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def swiglustep(gate, up, limit):
    gate, up = clamped(F.silu(gate), up, limit)
    return gate * up


def situ(gate, up, beta, linear_beta):
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * (linear_beta * torch.tanh(up / linear_beta))


def swigluoai(x, alpha, limit):
    gate, up = clamped(x[..., ::2], x[..., 1::2], limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


REFERENCES: dict[str, Reference] = {
    "relu_squared": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "gelu_new": gelu_new,
    "gelu_fast": gelu_fast,
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "softplus": F.softplus,
    "mish": F.mish,
    # F.hardswish is compared below; at -3 and 3 its gradient is one of a side, 0 and 1, where this has -0.5 and 1.5.
    "hardswish": lambda x: x * (x + 3).clamp(0, 6) / 6,
    "star_relu": star_relu,
    "xielu": xielu,
    "silu_and_mul": of_halves(lambda gate, up: F.silu(gate) * up),
    "mul_and_silu": of_halves(lambda up, gate: up * F.silu(gate)),
    "gelu_and_mul": of_halves(lambda gate, up: F.gelu(gate) * up),
    "gelu_tanh_and_mul": of_halves(lambda gate, up: gelu_tanh(gate) * up),
    "relu_squared_and_mul": of_halves(lambda gate, up: F.relu(gate).square() * up),
    "fatrelu_and_mul": of_halves(lambda gate, up, threshold: F.threshold(gate, threshold, 0.0) * up),
    "silu_and_mul_clamp": of_halves(silu_and_mul_clamp),
    "swiglustep_and_mul": of_halves(swiglustep),
    "situ_and_mul": of_halves(situ),
    "swigluoai_and_mul": swigluoai,
    "silu_mul": lambda gate, up: F.silu(gate) * up,
    "gelu_mul": lambda gate, up: F.gelu(gate) * up,
    "gelu_tanh_mul": lambda gate, up: gelu_tanh(gate) * up,
    "relu_squared_mul": lambda gate, up: F.relu(gate).square() * up,
    "relu_mul": lambda gate, up: F.relu(gate) * up,
    "bias_relu_squared": lambda x, bias: F.relu(x + bias).square(),
    "bias_gelu": lambda x, bias: F.gelu(x + bias),
}
DECLARED = {spec.name: spec for spec in specfile.read(ROOT / "ops.yaml").ops}
# One that is new needs no reference to pass the other tests.
OPS = {name: DECLARED[name] for name in REFERENCES}

# Halves from -10 to 10 hold every bound of the ops: 0, 3, 7 and their negatives.
VALUES = [x / 2 for x in range(-20, 21)] + [-0.0, 1e-3, -1e-3, 0.7, -0.7, 30.0, -30.0]
ALPHA = {"alpha_p": 0.7, "alpha_n": -0.3}
# Params that differ from the defaults, which may hide a term (beta of silu_and_mul_clamp is 0).
OTHERS = {"threshold": 1.5, "limit": 2.5, "alpha": 1.25, "beta": 0.75, "linear_beta": 3.0, "eps": -0.1, "scale": 1.5}


def operands(spec: OpSpec, dtype: torch.dtype, values: Sequence[float] = VALUES) -> list[torch.Tensor]:
    """Every combination of ``values``: the first full part varies by row, the second (or a vector) by column."""
    row, rows = torch.tensor(values, dtype=dtype), len(values)
    grids = iter([row[:, None].expand(rows, rows), row[None, :].expand(rows, rows)])
    tensors = []
    for input in spec.inputs:
        if input.layout is Layout.vector:
            tensors.append(row.clone())
        elif input.layout is Layout.scalar:
            tensors.append(torch.tensor([ALPHA[input.name]], dtype=dtype))
        else:
            tensors.append(packed(input.layout, [next(grids) for _ in input.parts]).contiguous())
    return tensors


def changed(spec: OpSpec) -> dict[str, float]:
    """The op's params, each with a value that is not its default."""
    return {name: OTHERS.get(name, 0.25) for name in spec.params}


def function(name: str) -> Any:
    return getattr(relu2ir.ops, name)


@pytest.mark.parametrize(("dtype", "rtol", "atol"), [(torch.float64, 1e-12, 1e-14), (torch.float32, 2e-6, 2e-6)])
@pytest.mark.parametrize("name", OPS)
def test_an_op_computes_its_reference(name, dtype, rtol, atol):
    spec, tensors = OPS[name], operands(OPS[name], dtype)
    for params in ({}, changed(spec)):
        expected = REFERENCES[name](*tensors, **{**spec.params, **params})
        torch.testing.assert_close(function(name)(*tensors, **params), expected, rtol=rtol, atol=atol)


def test_situ_without_a_linear_beta_leaves_up_as_it_is():
    x = operands(OPS["situ_and_mul"], torch.float64)[0].requires_grad_()
    gate, up = x.chunk(2, -1)
    expected = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * up
    (wanted,) = torch.autograd.grad(expected.sum(), x)
    got = relu2ir.ops.situ_and_mul(x, linear_beta=0)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        derived(OPS["situ_and_mul"], [x], {"linear_beta": 0.0})[0], wanted, rtol=1e-12, atol=1e-14
    )


# ** gradients **


def derived(spec: OpSpec, tensors: Sequence[torch.Tensor], params: dict[str, float]) -> list[torch.Tensor]:
    """For each tensor the gradient of the sum of the op's result, by its gradient op."""
    result = lower(spec)(*tensors, *{**spec.params, **params}.values())
    found = lower(spec.backward)(torch.ones_like(result), *tensors, *{**spec.params, **params}.values())
    outputs = found if isinstance(found, tuple) else (found,)
    return [
        outputs[i].sum_to_size(tensor.shape) for i, tensor in zip(spec.backward.gradient_outputs, tensors, strict=True)
    ]


@pytest.mark.parametrize("name", OPS)
def test_the_derived_gradient_is_autograds_of_the_reference_ties_at_bounds_included(name):
    spec = OPS[name]
    for params in ({}, changed(spec)):
        tensors = [tensor.requires_grad_() for tensor in operands(spec, torch.float64)]
        result = REFERENCES[name](*tensors, **{**spec.params, **params})
        expected = torch.autograd.grad(result.sum(), tensors)
        for got, want in zip(derived(spec, tensors, params), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", OPS)
def test_gradients_are_those_of_finite_differences(name):
    values = [-8.1, -1.3, -0.4, 0.6, 2.2, 8.3]  # away from every bound
    tensors = [tensor.requires_grad_() for tensor in operands(OPS[name], torch.float64, values)]
    assert torch.autograd.gradcheck(function(name), tensors)


# ** transformers' own layers **

ACT2CLS = {
    **{"relu_squared": "relu2", "silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"},
    **{"gelu_new": "gelu_new", "gelu_fast": "gelu_fast", "gelu_quick": "quick_gelu"},
    **{"mish": "mish", "hardswish": "hardswish"},
}
MLPS = [
    ("nemotron", "Nemotron", "relu_squared"),
    ("arcee", "Arcee", "relu_squared"),
    ("bitnet", "BitNet", "relu_squared_mul"),
    ("llama", "Llama", "silu_mul"),
    ("gemma", "Gemma", "gelu_tanh_mul"),
]


@pytest.mark.needs("transformers module")
@pytest.mark.parametrize("name", ACT2CLS)
def test_an_op_is_the_layer_of_transformers_activation_table(name):
    from transformers.activations import ACT2FN

    (x,) = operands(OPS[name], torch.float64)
    torch.testing.assert_close(function(name)(x), ACT2FN[ACT2CLS[name]](x), rtol=1e-12, atol=1e-14)


@pytest.mark.needs("transformers module")
def test_xielu_is_the_activation_of_apertus():
    from transformers.models.apertus.modeling_apertus import ApertusConfig, ApertusMLP

    act = ApertusMLP(ApertusConfig(hidden_size=4, intermediate_size=4, dtype=torch.float64)).act_fn.double()
    x = operands(OPS["xielu"], torch.float64)[0]
    torch.testing.assert_close(relu2ir.ops.xielu(x, act.alpha_p, act.alpha_n), act(x), rtol=1e-12, atol=1e-14)


@pytest.mark.needs("transformers module")
def test_swigluoai_is_the_gate_of_gpt_oss():
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts

    config = GptOssConfig()
    params = SimpleNamespace(alpha=config.swiglu_alpha, limit=config.swiglu_limit)
    (x,) = operands(OPS["swigluoai_and_mul"], torch.float32)
    assert torch.equal(relu2ir.ops.swigluoai_and_mul(x), GptOssExperts._apply_gate(params, x))


@pytest.mark.needs("transformers module")
@pytest.mark.parametrize(("module", "model", "name"), MLPS)
def test_an_op_is_the_activation_of_a_models_mlp(module, model, name):
    modeling = import_module(f"transformers.models.{module}.modeling_{module}")
    config = getattr(modeling, f"{model}Config")(hidden_size=4, intermediate_size=6, num_attention_heads=1)
    mlp = getattr(modeling, f"{model}MLP")(config)
    mlp.down_proj = mlp.ffn_sub_norm = torch.nn.Identity()
    x = torch.randn(5, 4)
    projections = [mlp.gate_proj, mlp.up_proj] if hasattr(mlp, "gate_proj") else [mlp.up_proj]
    assert torch.equal(function(name)(*[projection(x) for projection in projections]), mlp(x))
