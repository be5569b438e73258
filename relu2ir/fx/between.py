"""What may stand between two steps of an op without being one: dropouts, views, casts, masks, and what does nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

aten = torch.ops.aten


@dataclass(frozen=True)
class Between:
    """What may stand between two steps of an op, and is none of it: functions and methods of the step's result."""

    detail: str
    targets: tuple[Any, ...]
    modules: tuple[type[nn.Module], ...] = ()


# By the code of the near miss.
BETWEEN: Mapping[str, Between] = {
    "dropout": Between(
        "a dropout stands inside: move it behind the op, or capture in eval mode with torch.export",
        (F.dropout, torch.dropout, aten.dropout.default, F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d,
         F.dropout2d, F.dropout3d),
        (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    ),
    "view": Between(
        "a view stands inside: move it in front of the op or behind it",
        ("view", "reshape", "flatten", "unflatten", "transpose", "permute", "squeeze", "unsqueeze", "contiguous",
         torch.reshape, torch.flatten, torch.transpose, torch.permute, torch.squeeze, torch.unsqueeze,
         aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints,
         aten.transpose.int, aten.permute.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default,
         aten.contiguous.default),
        (nn.Flatten, nn.Unflatten),
    ),
    "cast": Between(
        "a cast stands inside: move it in front of the op or behind it",
        ("to", "float", "half", "double", "bfloat16", "type", "type_as", torch.Tensor.to, aten._to_copy.default,
         aten.to.dtype, torch.ops.prims.convert_element_type.default),
    ),
    "mask": Between(
        "a mask stands inside: apply it in front of the op or behind it",
        ("masked_fill", torch.masked_fill, aten.masked_fill.Scalar, aten.masked_fill.Tensor),
    ),
}  # fmt: skip
# What gives its operand's value has no code.
IDENTITY = Between("", (aten.alias.default, aten.clone.default, torch.clone, "clone"), (nn.Identity,))

_CODES: dict[Any, str] = {
    what: code for code, entry in {"": IDENTITY, **BETWEEN}.items() for what in (*entry.targets, *entry.modules)
}


def between(node: Node, root: nn.Module) -> tuple[str, Node] | None:
    """The code of what ``node`` does to its first operand, ``""`` for nothing, and that operand; None for all else."""
    operand = node.args[0] if node.args else node.kwargs.get("input")
    if not isinstance(operand, Node) or "memory_format" in node.kwargs:
        return None
    what = type(root.get_submodule(str(node.target))) if node.op == "call_module" else node.target
    code = _CODES.get(what)
    if code is None:
        return None
    return ("" if code == "dropout" and _drops_nothing(node) else code), operand


def _drops_nothing(node: Node) -> bool:
    """Whether a dropout is called by a literal as in eval mode. A module's mode may change."""
    if node.op != "call_function":
        return False
    named = [node.kwargs[keyword] for keyword in ("training", "train") if keyword in node.kwargs]
    return (node.args[2] if len(node.args) > 2 else next(iter(named), True)) is False
