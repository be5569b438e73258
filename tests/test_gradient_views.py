"""Gradients of operands of any shape, strides and values, as autograd runs the provider's kernel."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from relu2ir import library, operands
from relu2ir.layout import whole_shape
from relu2ir.oracle import mismatches

OPS = ["relu_squared", "gelu_tanh", "silu_and_mul", "swigluoai_and_mul", "relu_mul", "bias_relu_squared"]


@st.composite
def views(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Special values and others in a buffer that is permuted, stepped through, expanded and moved off its boundary."""
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.sampled_from([1, 1, 2, 3])) for _ in shape]
    wide = [shape[dim] * steps[dim] for dim in order]
    first = draw(st.integers(0, 3))
    values = torch.tensor(operands.special_values(dtype), dtype=dtype)
    seed = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    count = torch.Size(wide).numel() + first
    picked = values[torch.randint(len(values), (count,), generator=seed)]
    drawn = torch.where(torch.rand(count, generator=seed) < 0.5, picked, torch.randn(count, generator=seed).to(dtype))
    view = drawn[first:].view(wide).permute([order.index(dim) for dim in range(len(shape))])
    view = view[tuple(slice(None, None, step) for step in steps)]
    if draw(st.booleans()) and shape and shape[0] > 1:
        view = view[:1].expand(shape)
    return view


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, Tensor, list[Tensor]]:
    name, dtype = draw(st.sampled_from(OPS)), draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    tensors = [draw(views(whole_shape(input.layout, shape), dtype)) for input in library.find(name).inputs]
    return name, draw(views(shape, dtype)), tensors


@pytest.mark.needs("cpp")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(calls())
def test_a_gradient_is_right_of_any_view(call: tuple[str, Tensor, list[Tensor]]) -> None:
    name, grad, tensors = call
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    found = torch.autograd.grad(library.function(name)(*leaves, provider="cpp"), leaves, grad)
    spec = library.find(name).backward
    assert mismatches(spec, [grad, *tensors, *spec.params.values()], found) == []


@pytest.mark.needs("cpp")
@pytest.mark.parametrize("provider", ["cpp", "native"])
@pytest.mark.parametrize("save", ["input", "output"])
def test_nan_flows_through_the_gradient(provider: str, save: str) -> None:
    x = torch.tensor([torch.nan, -torch.inf, -1.0, 2.0], requires_grad=True)
    y = library.function("relu_squared")(x, provider=provider, save=save)
    (grad,) = torch.autograd.grad(y, x, torch.tensor([1.0, 1.0, torch.nan, torch.nan]))
    assert grad.isnan().tolist() == [True, False, save == "output", True]
