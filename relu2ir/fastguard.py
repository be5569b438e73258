"""`guards.not_plain` as a builtin of the extension: 0.5 us for two tensors against 4 (2-core CPU)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch.autograd import forward_ad

from relu2ir.guards import not_plain
from relu2ir.providers.compiled import load


@cache
def plain_builtin() -> Callable[..., bool] | None:
    """``plain(*tensors) -> bool``: whether a call on them is plain eager execution, as the dispatch keys tell.

    None where there is no extension, one that an older checkout built, or a torch that hides its dispatch keys.
    """
    compiled, _ = load()
    if not hasattr(compiled, "guard") or not compiled.sees_dispatch_state():
        return None
    types = (torch.Tensor, torch.nn.Parameter, torch.strided)
    plain = compiled.guard(vars(forward_ad), types, (torch._C._len_torch_function_stack, torch.Tensor.is_neg))
    with torch.inference_mode():
        compiled.accept(plain)
    return plain


def is_plain() -> Callable[..., bool]:
    """That builtin, with the rule in Python to ask where it says no.

    Within a backward torch 2.11 has other dispatch keys than outside, torch 2.13 has not: what the rule calls plain is
    learnt. Autocast is a key for each kind of device: while any is on nothing is.
    """
    plain = plain_builtin()
    if plain is None:
        return lambda *tensors: not_plain(tensors) is None
    compiled, _ = load()

    def ask(*tensors: torch.Tensor) -> bool:
        if plain(*tensors):
            return True
        if not_plain(tensors) is not None:
            return False
        if not torch._C._is_any_autocast_enabled():
            compiled.accept(plain)
        return True

    return ask
