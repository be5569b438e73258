"""What may change under a reader: which nodes of a graph can share memory, and which nodes write.

Told by schema, never by shapes or names alone: everything unknown may alias its operands and may write to them, so a
doubt costs a rewrite and never a result.
"""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from relu2ir.fx.reading import is_altered, spelled

# Composite functions whose schemas cannot be trusted to say "fresh" (dropout in eval mode returns its operand, einsum
# may return a view), apart from these, which always allocate.
_FRESH = {
    "linear",
    "matmul",
    "bmm",
    "conv1d",
    "conv2d",
    "conv3d",
    "batch_norm",
    "instance_norm",
    "layer_norm",
    "rms_norm",
    "embedding",
    "clone",
    "cat",
}
# Functions that write to an operand behind their first which no schema tells of: running statistics, a renormed weight.
# Each with the argument that asks for it: its place, its keyword, and what to take it for when it is not given.
_WRITES_STATE = {
    "batch_norm": (5, "training", True),
    "instance_norm": (5, "use_input_stats", True),
    "embedding": (3, "max_norm", None),
    "embedding_bag": (3, "max_norm", None),
}
_FRESH_MODULES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.RMSNorm, nn.Embedding)
_OPERATORS_IN_PLACE = frozenset(
    getattr(operator, f"i{name}")
    for name in (
        "add",
        "sub",
        "mul",
        "truediv",
        "floordiv",
        "mod",
        "pow",
        "and",
        "or",
        "xor",
        "lshift",
        "rshift",
        "matmul",
    )
) | {operator.setitem, operator.delitem}


class Aliases:
    """The alias groups and the writes of one graph over ``root``, found in one pass."""

    def __init__(self, graph: Graph, root: nn.Module) -> None:
        self.root = root
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.parent: dict[Node, Node] = {}
        self.writes: list[tuple[int, Node, Node]] = []  # position, who writes, to what
        self.holders: dict[int, Node] = {}  # who may hold a parameter or a buffer, by its id
        outside: Node | None = None  # what comes from outside the graph may alias anything else that does
        for node, position in self.position.items():
            if node.op in ("placeholder", "get_attr"):
                outside = outside or node
                self._join(node, outside)
                if node.op == "get_attr":
                    self.holders[id(operator.attrgetter(str(node.target))(root))] = node
            elif node.op != "output" and not self._is_fresh(node):
                for operand in (*node.all_input_nodes, *self._held(node)):
                    self._join(node, operand)
            self.writes.extend((position, node, target) for target in self._written(node))

    def write_after(self, nodes: Iterable[Node], position: int, own: Collection[Node] = ()) -> Node | None:
        """The first node behind ``position``, none of ``own``, that may write to the memory of any of ``nodes``."""
        groups = {self._group(node) for node in nodes}
        writes = (by for at, by, to in self.writes if at > position and self._group(to) in groups)
        return next((by for by in writes if by not in own), None)

    def seen_after(self, written: Node, writer: Node, own: Collection[Node]) -> Node | None:
        """Who, beside ``own``, may see what ``writer`` wrote to ``written`` through another name; None if no one does.

        Memory from outside the graph is seen by whoever owns it.
        """
        group, position = self._group(written), self.position
        members = [node for node in position if node not in own and self._group(node) is group]
        outside = next((node for node in members if node.op in ("placeholder", "get_attr")), None)
        if outside is not None:
            return outside
        before = [node for node in (*members, written) if position[node] < position[writer]]
        users = [user for node in before for user in node.users if user not in own]
        return next((user for user in users if position[user] > position[writer]), None)

    def _group(self, node: Node) -> Node:
        while (above := self.parent.get(node, node)) is not node:
            self.parent[node] = self.parent.get(above, above)
            node = above
        return node

    def _join(self, a: Node, b: Node) -> None:
        self.parent[self._group(a)] = self._group(b)

    def _held(self, node: Node) -> list[Node]:
        """The nodes that may hold a tensor of the module that ``node`` calls; ``node`` does from now on if none did."""
        if node.op != "call_module":
            return []
        module = self.root.get_submodule(str(node.target))
        tensors = itertools.chain(module.parameters(), module.buffers())
        if _is_known(module):
            return [self.holders[id(tensor)] for tensor in tensors if id(tensor) in self.holders]
        return [self.holders.setdefault(id(tensor), node) for tensor in tensors]

    def _is_fresh(self, node: Node) -> bool:
        primitive = spelled(node, self.root)
        if primitive is not None:
            return not (primitive.inplace or primitive.altered)
        if node.op == "call_module":
            module = self.root.get_submodule(str(node.target))
            return type(module) in _FRESH_MODULES and not is_altered(module)
        if isinstance(node.target, torch._ops.OpOverload):
            schema = node.target._schema
            composite = node.target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
            views = any(result.alias_info is not None for result in schema.returns)
            return schema.name.removeprefix("aten::") in _FRESH or not (composite or views)
        if node.target is operator.matmul:
            return True
        return (node.target if node.op == "call_method" else _torch_name(node.target)) in _FRESH

    def _written(self, node: Node) -> list[Node]:
        """The operands that ``node`` may write to."""
        first = _nodes(node.args[:1])
        if node.op == "call_method":
            name = str(node.target)
            in_place = name.endswith("_") and not name.startswith("__")
            return first if in_place or name.startswith(("__i", "__setitem__")) else _nodes(node.kwargs.get("out"))
        if node.op == "call_module":
            module = self.root.get_submodule(str(node.target))
            if _is_known(module):
                in_place = any(getattr(m, "inplace", False) for m in module.modules())
                state = any(getattr(m, "max_norm", None) is not None or m._buffers for m in module.modules())
                return [*(node.all_input_nodes if in_place else ()), *(self._held(node) if state else ())]
            return [*node.all_input_nodes, *self._held(node)]
        if node.op != "call_function":
            return []
        if _writes_state(node):
            return [operand for operand in node.all_input_nodes if operand not in first]
        if isinstance(node.target, torch._ops.OpOverload):
            named = zip(node.target._schema.arguments, node.args)
            written = [value for argument, value in named if argument.is_write]
            keywords = {argument.name for argument in node.target._schema.arguments if argument.is_write}
            return _nodes([*written, *(value for keyword, value in node.kwargs.items() if keyword in keywords)])
        if node.target in _OPERATORS_IN_PLACE:
            return first
        if getattr(node.target, "__module__", None) in ("_operator", "builtins", "math"):
            return []
        function = _torch_name(node.target)
        if function is None:
            return node.all_input_nodes
        return first if function.endswith("_") or _asks_in_place(node) else _nodes(node.kwargs.get("out"))


def _is_known(module: nn.Module) -> bool:
    """Whether all of ``module`` is torch's own."""
    return all(type(m).__module__.startswith("torch.nn.modules.") and not is_altered(m) for m in module.modules())


def _writes_state(node: Node) -> bool:
    target = node.target
    name = target._schema.name.removeprefix("aten::") if isinstance(target, torch._ops.OpOverload) else None
    row = _WRITES_STATE.get(name or _torch_name(target) or "")
    if row is None:
        return False
    at, keyword, default = row
    asked = node.args[at] if at < len(node.args) else node.kwargs.get(keyword, default)
    return asked is not None and asked is not False


def _asks_in_place(node: Node) -> bool:
    if getattr(node.target, "__module__", None) != "torch.nn.functional":
        return False
    try:
        arguments = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments
    except (TypeError, ValueError):
        return bool(node.kwargs.get("inplace", False))
    return arguments.get("inplace", False) is not False


def _torch_name(target: Any) -> str | None:
    """The bare name of a function of torch; None for anything that may do as it likes."""
    name = torch.overrides.resolve_name(target)
    return None if name is None else name.rpartition(".")[2]


def _nodes(value: Any) -> list[Node]:
    found: list[Node] = []
    map_arg(value, found.append)
    return found
