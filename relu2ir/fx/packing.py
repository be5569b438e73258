"""How graphs split a packed tensor: ``x.chunk(2, -1)``, ``x[..., ::2]`` and their kin, read as parts of an input."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from relu2ir.spec import Layout

aten = torch.ops.aten
_CHUNK = (torch.chunk, aten.chunk.default, "chunk")
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
    if node.target is aten.slice.Tensor:
        return _every_second(node, *node.args)
    if node.target is not operator.getitem or not isinstance(node.args[0], Node):
        return None
    split, index = node.args
    if isinstance(index, tuple) and len(index) == 2 and index[0] is ... and isinstance(index[1], slice):
        return _every_second(node, split, -1, index[1].start, index[1].stop, index[1].step)
    if index not in (0, 1):
        return None
    source = split.args[0] if split.args else split.kwargs.get("input", split.kwargs.get("self"))
    if not isinstance(source, Node) or not _halves(split, source):
        return None
    return Part(source, Layout.halves, int(index), (node, split))


def _every_second(
    node: Node, source: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> Part | None:
    """``x[..., ::2]`` or ``x[..., 1::2]`` as the first or the second of each pair."""
    shape = getattr(value_of(source), "shape", (0,))
    last = len(shape) > 0 and dim in (-1, len(shape) - 1) and shape[-1] % 2 == 0
    whole = end is None or (isinstance(end, int) and end >= shape[-1] > 0)
    if not (last and whole and step == 2 and start in (None, 0, 1)):
        return None
    return Part(source, Layout.pairs, start or 0, (node,))


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


def value_of(node: Node) -> Any:
    """The fake value that Dynamo or torch.export recorded for ``node``, or None."""
    return node.meta.get("val", node.meta.get("example_value"))
