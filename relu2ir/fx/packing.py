"""How graphs split a packed tensor: ``x.chunk(2, -1)``, ``x[..., ::2]`` and their kin, read as parts of an input."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from relu2ir.spec import Layout

aten = torch.ops.aten
_CHUNK = (torch.chunk, aten.chunk.default, "chunk")
_NARROW = (torch.narrow, aten.narrow.default, "narrow")
_SPLIT = (torch.split, aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes, "split", "split_with_sizes")


@dataclass(frozen=True)
class Part:
    """Part ``index`` of ``source``; ``views`` are the nodes that took it out, the last first."""

    source: Node
    layout: Layout
    index: int
    views: tuple[Node, ...]


def part_of(node: Node) -> Part | None:
    """``node`` as a part of a packed tensor, or None."""
    sliced = _sliced(node)
    if sliced is not None:
        return _part_by_slice(node, *sliced)
    if node.target is not operator.getitem or not isinstance(node.args[0], Node) or node.args[1] not in (0, 1):
        return None
    split, index = node.args
    source = split.args[0] if split.args else split.kwargs.get("input", split.kwargs.get("self"))
    if not isinstance(source, Node) or not _halves(split, source):
        return None
    return Part(source, Layout.halves, int(index), (node, split))


def _sliced(node: Node) -> tuple[Node, Any, slice] | None:
    """The tensor, the dimension and the slice of ``x[..., a:b:c]``, ``x.narrow(dim, start, length)`` and aten.slice."""
    if not node.args or node.kwargs:
        return None
    source, rest = node.args[0], list(node.args[1:])
    if not isinstance(source, Node):
        return None
    if node.target is operator.getitem:
        index = rest[0]
        if isinstance(index, tuple) and len(index) == 2 and index[0] is ... and isinstance(index[1], slice):
            return source, -1, index[1]
    elif node.target is aten.slice.Tensor:
        dim, start, stop, step = rest + [0, None, None, 1][len(rest) :]
        return source, dim, slice(start, stop, step)
    elif node.target in _NARROW and [type(arg) for arg in rest] == [int, int, int]:
        dim, start, length = rest
        return source, dim, slice(start, start + length)
    return None


def _part_by_slice(node: Node, source: Node, dim: Any, taken: slice) -> Part | None:
    shape: Sequence[Any] = getattr(value_of(source), "shape", ())
    numbers = all(bound is None or type(bound) is int for bound in (taken.start, taken.stop, taken.step))
    if not numbers or len(shape) == 0 or dim not in (-1, len(shape) - 1):
        return None
    width = shape[-1]
    if type(width) is not int or width == 0 or width % 2:
        return None
    elements = taken.indices(width)
    for index in (0, 1):
        if elements == (index * width // 2, (index + 1) * width // 2, 1):
            return Part(source, Layout.halves, index, (node,))
        if elements == (index, width, 2):
            return Part(source, Layout.pairs, index, (node,))
    return None


def _halves(split: Node, source: Node) -> bool:
    """Whether ``split`` gives two equal parts of the last dimension."""
    by_chunk, by_split = split.target in _CHUNK, split.target in _SPLIT
    shape = getattr(value_of(source), "shape", None)
    if not (by_chunk or by_split) or (shape is not None and len(shape) == 0):
        return False
    sizes = _argument(split, 1, ("chunks", "split_size_or_sections", "split_size", "split_sizes"), None)
    dim = _argument(split, 2, ("dim",), 0)
    if dim != -1 and (shape is None or dim != len(shape) - 1):
        return False
    width = shape[-1] if shape is not None else None
    if by_chunk:
        return sizes == 2 and (width is None or width % 2 == 0)
    if isinstance(sizes, list | tuple):
        return len(sizes) == 2 and isinstance(sizes[0], int) and sizes[0] == sizes[1]
    return isinstance(sizes, int) and width is not None and 2 * sizes == width


def _argument(node: Node, at: int, keywords: tuple[str, ...], default: Any) -> Any:
    if at < len(node.args):
        return node.args[at]
    return next((node.kwargs[keyword] for keyword in keywords if keyword in node.kwargs), default)


# Methods and functions that change a tensor's type, among other things: fake values say what they did.
_CASTS = (
    "to", "type", "type_as", "float", "half", "bfloat16", torch.Tensor.to, aten._to_copy.default, aten.to.dtype,
    aten.type_as.default,
)  # fmt: skip


def cast_of(node: Node) -> Node | None:
    """What ``node`` only changes the floating type of, between a half type and float32; None if it is no such cast."""
    if node.target not in _CASTS or not node.args or not isinstance(node.args[0], Node):
        return None
    source, value = value_of(node.args[0]), value_of(node)
    if not isinstance(source, torch.Tensor) or not isinstance(value, torch.Tensor):
        return None
    halves = {torch.float16, torch.bfloat16}
    kept = source.device == value.device and source.shape == value.shape and source.stride() == value.stride()
    between = {source.dtype, value.dtype} - {torch.float32} <= halves and source.dtype != value.dtype
    return node.args[0] if kept and between and torch.float32 in (source.dtype, value.dtype) else None


def value_of(node: Node) -> Any:
    """The fake value that Dynamo or torch.export recorded for ``node``, or None."""
    return node.meta.get("val", node.meta.get("example_value"))
