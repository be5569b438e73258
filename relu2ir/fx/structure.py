"""Copies of modules and graphs that share every tensor: fusing and lowering leave what they were given alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MethodType
from typing import Protocol, runtime_checkable

from torch import fx, nn


@runtime_checkable
class Owned(Protocol):
    """A value in a module's attributes that belongs to that module."""

    def of(self, owner: nn.Module) -> object:
        """The same for a copy of the module."""


def copy_structure(
    module: nn.Module, children: Mapping[str, nn.Module | None], graph: fx.Graph | None = None
) -> nn.Module:
    """A module like ``module`` with other children: same class, same tensors, own hooks, flags and tables.

    A graph module gets ``graph``, or a copy of its own.
    """
    is_graph, kind = isinstance(module, fx.GraphModule), type(module)
    new = fx.GraphModule.__new__(kind) if is_graph else object.__new__(kind)
    state = dict(vars(module))
    for name, value in state.items():
        if name in ("_parameters", "_buffers", "_non_persistent_buffers_set") or "_hooks" in name:
            state[name] = copy.copy(value)
        elif isinstance(value, MethodType) and value.__self__ is module:
            state[name] = MethodType(value.__func__, new)
        elif isinstance(value, Owned):
            state[name] = value.of(new)
    vars(new).update(state | {"_modules": dict(children)})
    if is_graph:
        new.graph = copy_graph(module.graph) if graph is None else graph
    return new


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """The same nodes; what their ``meta`` holds is shared."""
    new = fx.Graph(tracer_cls=graph._tracer_cls)
    nodes: dict[fx.Node, fx.Node] = {}
    copied = new.graph_copy(graph, nodes, return_output_node=True)
    for old, node in nodes.items():
        # Dynamo leaves the source of each input in an attribute of its own, and AOTAutograd insists on it.
        if hasattr(old, "_dynamo_source"):
            node._dynamo_source = old._dynamo_source
    if copied is not None:
        value, output = copied
        new.output(value, type_expr=output.type).meta = copy.copy(output.meta)
    new.set_codegen(graph._codegen)
    return new
