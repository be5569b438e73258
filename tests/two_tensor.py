"""A wrapper subclass of two tensors that does to both what is done to it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only


class TwoTensor(Tensor):
    a: Tensor
    b: Tensor

    @staticmethod
    def __new__(cls, a: Tensor, b: Tensor) -> TwoTensor:
        made = Tensor._make_wrapper_subclass(cls, a.shape, strides=a.stride(), dtype=a.dtype, device=a.device)
        made.a, made.b = a, b
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        parts = []
        for name in ("a", "b"):
            own = tree_map_only(TwoTensor, lambda each, name=name: getattr(each, name), (args, kwargs or {}))
            parts.append(function(*own[0], **own[1]))
        if isinstance(parts[0], Tensor):
            return TwoTensor(*parts)
        return type(parts[0])(map(TwoTensor, *parts))
