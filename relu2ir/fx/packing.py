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
_CHUNK_EVENLY = (torch.tensor_split, aten.tensor_split.sections, "tensor_split")
_SPLIT = (torch.split, aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes, "split", "split_with_sizes")
_UNBIND = (torch.unbind, aten.unbind.int, "unbind")
_SELECT = (torch.select, aten.select.int, "select")
_SQUEEZE = (torch.squeeze, aten.squeeze.dim, aten.squeeze.dims, "squeeze")
_RESHAPE = (torch.reshape, torch.unflatten, aten.view.default, aten.reshape.default, aten.unflatten.int,
            "view", "reshape", "unflatten")  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Part ``index`` of ``source``; ``views`` are the nodes that took it out, the last first."""

    source: Node
    layout: Layout
    index: int
    views: tuple[Node, ...]


def part_of(node: Node) -> Part | None:
    """``node`` as a part of a packed tensor, or None."""
    return _part_by_split(node) or _part_by_slice(node) or _part_by_row(node)


def _part_by_split(node: Node) -> Part | None:
    """``x.chunk(2, -1)[0]`` and its kin."""
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
        *before, last = rest[0] if isinstance(rest[0], tuple) and rest[0] else (None,)
        rank = getattr(value_of(source), "ndim", None)
        whole = before == [...] or (len(before) + 1 == rank and all(each == slice(None) for each in before))
        if whole and isinstance(last, slice):
            return source, -1, last
    elif node.target is aten.slice.Tensor:
        dim, start, stop, step = rest + [0, None, None, 1][len(rest) :]
        return source, dim, slice(start, stop, step)
    elif node.target in _NARROW and [type(arg) for arg in rest] == [int, int, int]:
        dim, start, length = rest
        return source, dim, slice(start, start + length)
    return None


def _part_by_slice(node: Node) -> Part | None:
    sliced = _sliced(node)
    if sliced is None:
        return None
    source, dim, taken = sliced
    shape: Sequence[Any] = getattr(value_of(source), "shape", ())
    numbers = all(bound is None or type(bound) is int for bound in (taken.start, taken.stop, taken.step))
    if not numbers and dim == -1 and taken.step is None:
        return _part_by_half_the_size(node, source, taken)
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


def _part_by_half_the_size(node: Node, source: Node, taken: slice) -> Part | None:
    """``x[..., :d]`` and ``x[..., d:]`` where the graph computes d as ``x.shape[-1] // 2``."""
    bound = taken.stop if taken.start is None else taken.start
    if not isinstance(bound, Node) or (taken.start is not None and taken.stop is not None):
        return None
    if bound.target is not operator.floordiv or bound.args[1] != 2 or not isinstance(bound.args[0], Node):
        return None
    size = bound.args[0]
    views = [node, bound, size]
    if size.target == "size" and size.args == (source, -1):
        return Part(source, Layout.halves, int(taken.stop is None), tuple(views))
    sizes = size.args[0] if size.target is operator.getitem and size.args[1] == -1 else None
    of = (getattr, "shape") if isinstance(sizes, Node) and sizes.target is getattr else ("size",)
    if isinstance(sizes, Node) and (sizes.target, *sizes.args[1:]) == of and sizes.args[0] is source:
        return Part(source, Layout.halves, int(taken.stop is None), (*views, sizes))
    return None


def _part_by_row(node: Node) -> Part | None:
    """``x.unflatten(-1, (2, -1)).unbind(-2)[0]``, a row of halves seen side by side, and its kin."""
    row = _row(node)
    if row is None:
        return None
    stacked, dim, index, views = row
    source = stacked.args[0] if stacked.target in _RESHAPE and stacked.args else None
    if not isinstance(source, Node) or index not in (0, 1):
        return None
    before, after = (getattr(value_of(each), "shape", None) for each in (source, stacked))
    if before is None or after is None or len(after) != len(before) + 1 or after[:-2] != before[:-1]:
        return None
    dim = dim - len(after) if dim >= 0 else dim
    layout = {-2: Layout.halves, -1: Layout.pairs}.get(dim)
    if layout is None or after[dim] != 2 or before[-1] != after[-1] * after[-2]:
        return None
    return Part(source, layout, index, (*views, stacked))


def _row(node: Node) -> tuple[Node, int, int, tuple[Node, ...]] | None:
    """The tensor, the dimension, the index and the views of one row of it: unbind, select, ``[..., 0, :]``, a slice."""
    source, *rest = node.args if node.args and isinstance(node.args[0], Node) else (None,)
    if not isinstance(source, Node) or node.kwargs:
        return None
    if node.target is operator.getitem and source.target in _UNBIND and isinstance(rest[0], int):
        stacked, dim = source.args[0], _argument(source, 1, ("dim",), 0)
        return (stacked, dim, rest[0], (node, source)) if isinstance(stacked, Node) else None
    if node.target is operator.getitem and isinstance(rest[0], tuple) and rest[0][:1] == (...,):
        at, *behind = rest[0][1:] or (None,)
        dim = -1 - len(behind)
        return (source, dim, at, (node,)) if type(at) is int and behind in ([], [slice(None)]) else None
    if node.target in _SELECT and [type(arg) for arg in rest] == [int, int]:
        return source, rest[0], rest[1], (node,)
    sliced = _sliced(source) if node.target in _SQUEEZE else None
    if sliced is None or rest not in ([sliced[1]], [[sliced[1]]]) or type(sliced[2].start) is not int:
        return None
    stacked, dim, taken = sliced
    return (stacked, dim, taken.start, (node, source)) if taken == slice(taken.start, taken.start + 1, 1) else None


def _halves(split: Node, source: Node) -> bool:
    """Whether ``split`` gives two equal parts of the last dimension."""
    by_chunk, by_split = split.target in (*_CHUNK, *_CHUNK_EVENLY), split.target in _SPLIT
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
    aten.type_as.default, torch.ops.prims.convert_element_type.default,
)  # fmt: skip


def cast_of(node: Node) -> Node | None:
    """What ``node`` only changes the floating type of, between a half type and float32; None if it is no such cast."""
    if node.target not in _CASTS or not node.args or not isinstance(node.args[0], Node):
        return None
    source, value = value_of(node.args[0]), value_of(node)
    if not isinstance(source, torch.Tensor) or not isinstance(value, torch.Tensor):
        return None
    halves = {torch.float16, torch.bfloat16}
    kept = source.device == value.device and source.shape == value.shape
    between = {source.dtype, value.dtype} - {torch.float32} <= halves and source.dtype != value.dtype
    return node.args[0] if kept and between and torch.float32 in (source.dtype, value.dtype) else None


def value_of(node: Node) -> Any:
    """The fake value that Dynamo or torch.export recorded for ``node``, or None."""
    return node.meta.get("val", node.meta.get("example_value"))
