"""The shapes and strides of a match: whether its inputs are what the op declares, and its result what the op gives."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._prims_common import compute_elementwise_output_strides
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from relu2ir.fx.packing import value_of
from relu2ir.layout import is_broadcast_to, logical_shape
from relu2ir.spec import Layout, OpSpec


def are_declared(spec: OpSpec, tensors: Sequence[Node], root: nn.Module) -> bool:
    """Whether the op's ``tensors`` have the shapes that it declares, where these are known.

    Two full inputs of different shapes are no match: no kernel expands one, so a shorter op serves better. A broadcast
    input must be known: x + y may be two full tensors.
    """
    inputs = spec.inputs
    values = [value_of(tensor) for tensor in tensors]
    if not all(isinstance(value, torch.Tensor) for value in values):
        held = [_is_held_vector(tensor, root) for tensor in tensors]
        return not any(input.layout.broadcast for input in inputs) and any(held) == all(held)
    shape = logical_shape(inputs[0].layout, values[0].shape)
    pairs = list(zip(inputs, values, strict=True))
    broadcast = [(input, value) for input, value in pairs if input.layout.broadcast]
    full = [logical_shape(input.layout, value.shape) for input, value in pairs if not input.layout.broadcast]
    alike = all(_is_same(shape, other) for other in full)
    return alike and shape is not None and all(is_broadcast_to(i.layout, v.shape, shape) for i, v in broadcast)


def _is_held_vector(node: Node, root: nn.Module) -> bool:
    """Whether ``node`` reads a tensor of the model with fewer than two dimensions: a scale, a bias."""
    if node.op != "get_attr":
        return False
    held = operator.attrgetter(str(node.target))(root)
    return isinstance(held, torch.Tensor) and held.dim() < 2


def _is_same(a: Sequence[Any] | None, b: Sequence[Any] | None) -> bool:
    """Whether two shapes are known to be one, without a guard on symbolic sizes."""
    if a is None or b is None or len(a) != len(b):
        return False
    return all(m == n if type(m) is type(n) is int else statically_known_true(m == n) for m, n in zip(a, b))


def has_strides_of_op(spec: OpSpec, tensors: Sequence[Node], root: Node) -> bool:
    """Whether the op gives its result the strides that ``root`` has; True where it is not known.

    Where operands disagree PyTorch goes by the first: ``y * silu(x)`` has those of y, the op those of its first input.
    """
    values = [value_of(node) for node in (*tensors, root)]
    plain = [input.layout is Layout.plain for input in spec.inputs]
    if not all(plain) or not all(isinstance(value, torch.Tensor) for value in values):
        return True
    *operands, result = values
    if not all(_is_same(value.shape, result.shape) for value in operands):
        return True
    strides = result.stride()
    alike = all(_is_same(value.stride(), strides) for value in operands)
    return alike or _is_same(compute_elementwise_output_strides(*operands), strides)


def widens_nothing(made: Node, reader: Node) -> bool:
    """Whether ``made``, one number everywhere, gives ``reader`` no other shape or type than the number would."""
    others = [node for node in reader.all_input_nodes if node is not made]
    value = value_of(made)
    if not isinstance(value, torch.Tensor):
        return "dtype" not in made.kwargs and made.op == "call_function" and made.args[:1] in [(o,) for o in others]
    shapes = [value_of(other).shape for other in others if isinstance(value_of(other), torch.Tensor)]
    return any(_fits(value.shape, shape) for shape in shapes)


def _fits(shape: Sequence[Any], into: Sequence[Any]) -> bool:
    """Whether a tensor of ``shape`` can be expanded to the shape ``into``."""
    return len(shape) <= len(into) and all(a == 1 or a == b for a, b in zip(reversed(shape), reversed(into)))
