"""Whether a call is plain eager execution, the only kind in which a kernel may replace PyTorch.

Everywhere else (a trace, torch.func, forward-mode AD, a mode, a tensor subclass, autocast, a lazy bit) the op must *be*
its PyTorch expression, or the transform would not see inside it: torch.library.custom_op's forward-mode derivative, for
one, is silently zero. The probes are private to torch, so they are all here, and `tests/test_guards.py` runs each one
with a kernel that answers differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

EXACT = frozenset({torch.Tensor, torch.nn.Parameter})
_TRACED_TYPES = frozenset({"FakeTensor", "FunctionalTensor"})


@dataclass(frozen=True)
class NotPlain:
    """Why only plain PyTorch may run. ``traced``: a graph is being recorded, and may record another op instead.
    ``transforms``: what differentiates is no plain autograd, which alone can run an autograd.Function of ours.
    """

    reason: str
    traced: bool = False
    transforms: bool = False


FUNCTORCH = NotPlain("a torch.func transform is active", transforms=True)
FORWARD_AD = NotPlain("forward-mode AD is active", transforms=True)
FUNCTION_MODE = NotPlain("a TorchFunctionMode is active")
DISPATCH_MODE = NotPlain("a TorchDispatchMode is active")
TRACED = NotPlain("the call is being traced", traced=True)
AUTOCAST = NotPlain("autocast is on for the device")
LAZY_BIT = NotPlain("a tensor has its conjugate or negative bit set, or is zero without memory")
NOT_STRIDED = NotPlain("a tensor is sparse or nested")


def not_plain(tensors: Sequence[torch.Tensor]) -> NotPlain | None:
    """The first reason why this call is not plain eager execution, or None."""
    for tensor in tensors:
        kind = type(tensor)
        if kind not in EXACT:
            if torch._C._functorch.peek_interpreter_stack() is not None:
                return FUNCTORCH
            traced = kind.__name__ in _TRACED_TYPES
            return TRACED if traced else NotPlain(f"{kind.__module__}.{kind.__qualname__} is not exactly torch.Tensor")
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return FUNCTORCH
    if forward_ad._current_level >= 0:
        return FORWARD_AD
    if torch._C._get_tracing_state() is not None:
        return TRACED
    if torch._C._len_torch_dispatch_stack():
        return DISPATCH_MODE
    # torch.set_default_device keeps a mode on the stack for good; it only changes factory functions.
    if torch._C._len_torch_function_stack() and any(
        type(mode) is not DeviceContext for mode in _get_current_function_mode_stack()
    ):
        return FUNCTION_MODE
    for tensor in tensors:
        if torch._C._functorch.is_legacy_batchedtensor(tensor):  # autograd.grad(is_grads_batched=True)
            return FUNCTORCH
        if tensor.is_neg() or tensor.is_conj() or torch._is_zerotensor(tensor):
            return LAZY_BIT
        if tensor.layout is not torch.strided or tensor.is_nested:
            return NOT_STRIDED
    device = tensors[0].device.type
    return AUTOCAST if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device) else None
