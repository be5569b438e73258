"""Kernels that write their input, by the rules of PyTorch's own in-place ops: its errors, and the version that autograd
compares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class _Written(torch.autograd.Function):
    """Says to autograd that a tensor is written, and nothing more: it refuses before anything is lost."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def check_writable(x: torch.Tensor) -> None:
    """RuntimeError, with PyTorch's words, for a tensor that its own in-place ops refuse; ``x`` is as it was then."""
    if torch._debug_has_internal_overlap(x) == 1:
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )
    if x.is_inference():
        if not torch.is_inference_mode_enabled():
            raise RuntimeError(
                "Inplace update to inference tensor outside InferenceMode is not allowed. You can make a clone to get "
                "a normal tensor before doing inplace update."
            )
    elif torch.is_grad_enabled() and x.requires_grad:
        if x.is_leaf:
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
        if x._is_view():
            _Written.apply(x)  # a view of a leaf, or one of several views at once, is refused here


def writing(kernel: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """``kernel``, which returns the input that it wrote; a backward that kept it from before will refuse to run."""

    def write(x: torch.Tensor, *params: Any) -> torch.Tensor:
        kernel(x, *params)
        if not x.is_inference():
            torch.autograd.graph.increment_version(x)
        return x

    return write
