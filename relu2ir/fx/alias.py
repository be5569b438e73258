"""What may change under a reader: which nodes of a graph can share memory, and which nodes write.

Told by schema, never by shapes or names alone: everything unknown may alias its operands and may write to them, so a
doubt costs a rewrite and never a result.
"""

from __future__ import annotations

import inspect
import itertools
import operator
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable
from functools import cache
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from relu2ir.fx.packing import value_of
from relu2ir.fx.reading import is_altered, spelled

# A composite function's schema cannot be trusted to say "fresh" (dropout in eval mode returns its operand, einsum may
# return a view); these always allocate.
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
    "group_norm",
    "interpolate",
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
        self.bodies: dict[fx.GraphModule, Aliases] = {}  # of what higher-order operators run
        self.holders: dict[int, Node] = {}  # who may hold a parameter or a buffer, by its id
        self.members: dict[Node, list[Node]] = {}  # of each group, in order
        self.writes: dict[Node, list[tuple[int, Node]]] = {}  # to each group, in order: position, who writes
        written: list[tuple[Node, Node]] = []  # who writes, to what
        outside: Node | None = None  # what comes from outside the graph may alias anything else that does
        for node in self.position:
            if node.op in ("placeholder", "get_attr") and self._body(node) is None:
                outside = outside or node
                self._join(node, outside)
                if node.op == "get_attr":
                    self.holders[id(operator.attrgetter(str(node.target))(root))] = node
            elif node.op not in ("placeholder", "get_attr", "output"):
                for operand in self._shared(node):
                    self._join(node, operand)
                written.extend((node, operand) for operand in self._written(node))
        for node in self.position:
            self.members.setdefault(self._group(node), []).append(node)
        for node, operand in written:
            self.writes.setdefault(self._group(operand), []).append((self.position[node], node))
        held = {self._group(node) for node in (*self.holders.values(), *([outside] if outside else []))}
        self.writes_outside = not held.isdisjoint(self.writes)
        returned = (node for end in self.position if end.op == "output" for node in end.all_input_nodes)
        self.returns_outside = not held.isdisjoint(map(self._group, returned))

    def write_after(self, nodes: Iterable[Node], position: int, own: Collection[Node] = ()) -> Node | None:
        """The first node behind ``position``, none of ``own``, that may write to the memory of any of ``nodes``."""
        found: list[tuple[int, Node]] = []
        for group in {self._group(node) for node in nodes}:
            writes = self.writes.get(group, [])
            behind = itertools.islice(writes, bisect_right(writes, position, key=lambda write: write[0]), None)
            found.extend(itertools.islice((write for write in behind if write[1] not in own), 1))
        return min(found, key=lambda write: write[0])[1] if found else None

    def seen_after(self, written: Node, writer: Node) -> Node | None:
        """Who may see what ``writer`` wrote to ``written`` through another name; None if no one does.

        Memory from outside the graph is seen by whoever owns it.
        """
        position, members = self.position, self.members[self._group(written)]
        outside = next((node for node in members if node.op in ("placeholder", "get_attr")), None)
        if outside is not None:
            return outside
        users = [user for node in members if position[node] < position[writer] for user in node.users]
        return next((user for user in users if position[user] > position[writer]), None)

    def _group(self, node: Node) -> Node:
        while (above := self.parent.get(node, node)) is not node:
            self.parent[node] = self.parent.get(above, above)
            node = above
        return node

    def _join(self, a: Node, b: Node) -> None:
        self.parent[self._group(a)] = self._group(b)

    def _body(self, node: Node) -> fx.GraphModule | None:
        """The graph module that ``node`` stands for, as a higher-order operator takes one."""
        value = operator.attrgetter(str(node.target))(self.root) if node.op == "get_attr" else None
        return value if isinstance(value, fx.GraphModule) else None

    def _bodies(self, node: Node) -> list[fx.GraphModule]:
        """The graph modules that ``node`` runs, a higher-order operator."""
        if not isinstance(node.target, torch._ops.HigherOrderOperator):
            return []
        return [body for body in map(self._body, node.all_input_nodes) if body is not None]

    def _inside(self, node: Node) -> list[Aliases]:
        for body in self._bodies(node):
            if body not in self.bodies:
                self.bodies[body] = Aliases(body.graph, body)
        return [self.bodies[body] for body in self._bodies(node)]

    def _held(self, node: Node) -> list[Node]:
        """The nodes that may hold a tensor of the modules that ``node`` runs; ``node`` does from now on if none did."""
        called = [self.root.get_submodule(str(node.target))] if node.op == "call_module" else self._bodies(node)
        tensors = itertools.chain(*((*module.parameters(), *module.buffers()) for module in called))
        if all(map(_is_known, called)):
            return [self.holders[id(tensor)] for tensor in tensors if id(tensor) in self.holders]
        return [self.holders.setdefault(id(tensor), node) for tensor in tensors]

    def _shared(self, node: Node) -> list[Node]:
        """The operands whose memory the result of ``node`` may be."""
        everything = [*node.all_input_nodes, *self._held(node)]
        primitive = spelled(node, self.root)
        if primitive is not None and not primitive.altered:
            return _nodes(primitive.operands[:1]) if primitive.inplace else []
        if node.op == "call_module":
            module = self.root.get_submodule(str(node.target))
            return [] if type(module) in _FRESH_MODULES and not is_altered(module) else everything
        if node.target is operator.matmul:
            return []
        if node.target in (operator.getitem, "__getitem__"):
            return _nodes(node.args[:1])  # never the index
        if node.target in (operator.setitem, "__setitem__"):
            known = isinstance(value_of(_nodes(node.args[:1])[0]), torch.Tensor)
            return [] if known else everything  # a list or a dict holds what is put into it
        bodies = self._inside(node)
        if bodies:
            return everything if any(body.returns_outside for body in bodies) else []
        if _aten_name(node) in _FRESH and "out" not in node.kwargs:
            return []
        overloads = _overloads(node.target)
        if not overloads or any(map(_is_composite, overloads)):
            return everything
        by_schema = isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket)
        shared = _by_schema(node, overloads, lambda argument: argument.alias_info is not None)
        # What a function of torch calls its arguments, its schema need not.
        return everything if node.kwargs and shared and not by_schema else [*shared, *self._written(node)]

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
        if isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            return _by_schema(node, _overloads(node.target), lambda argument: argument.is_write)
        if node.target in _OPERATORS_IN_PLACE:
            return first
        bodies = self._inside(node)
        if bodies:
            writes = any(body.writes_outside for body in bodies)
            return [*node.all_input_nodes, *self._held(node)] if writes else []
        if getattr(node.target, "__module__", None) in ("_operator", "builtins", "math"):
            return []
        if str(getattr(node.target, "__module__", None)).startswith("torch._functorch."):
            return []  # transforms wrap, unwrap and differentiate
        function = _torch_name(node.target)
        if function is None:
            return node.all_input_nodes
        return first if function.endswith("_") or _asks_in_place(node) else _nodes(node.kwargs.get("out"))


def _is_known(module: nn.Module) -> bool:
    """Whether all of ``module`` is torch's own."""
    return all(type(m).__module__.startswith("torch.nn.modules.") and not is_altered(m) for m in module.modules())


def _writes_state(node: Node) -> bool:
    row = _WRITES_STATE.get(_aten_name(node) or "")
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


def _aten_name(node: Node) -> str | None:
    """The name of the function of torch that ``node`` calls; None for anything else."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.removeprefix("aten::")
    return str(node.target) if node.op == "call_method" else _torch_name(node.target)


@cache
def _overloads(target: Any) -> tuple[torch._ops.OpOverload, ...]:
    """The operators that a call of ``target`` may reach; none where that is not known."""
    if isinstance(target, torch._ops.OpOverload):
        return (target,)
    if isinstance(target, str):
        packet = getattr(torch.ops.aten, target, None) if hasattr(torch.Tensor, target) else None
    elif isinstance(target, torch._ops.OpOverloadPacket):
        packet = target
    else:
        name = _torch_name(target)
        packet = None if name is None else getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return ()
    overloads = (getattr(packet, name) for name in packet.overloads())
    # TorchScript's own, of numbers and lists, reach no dispatcher.
    return tuple(each for each in overloads if torch._C._dispatch_has_kernel(each.name()))


def _is_composite(overload: torch._ops.OpOverload) -> bool:
    return overload.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


def _by_schema(
    node: Node, overloads: Iterable[torch._ops.OpOverload], asked: Callable[[torch.Argument], bool]
) -> list[Node]:
    """The operands of ``node`` in the place, or by the name, of an argument that is ``asked`` for in any overload."""
    found: dict[Node, None] = {}
    for overload in overloads:
        arguments = overload._schema.arguments
        values = [value for argument, value in zip(arguments, node.args) if asked(argument)]
        values += [
            node.kwargs[argument.name] for argument in arguments if asked(argument) and argument.name in node.kwargs
        ]
        found |= dict.fromkeys(_nodes(values))
    return list(found)


@cache
def _torch_name(target: Any) -> str | None:
    """The bare name of a function of torch; None for anything that may do as it likes."""
    name = torch.overrides.resolve_name(target)
    return None if name is None else name.rpartition(".")[2]


def _nodes(value: Any) -> list[Node]:
    found: list[Node] = []
    map_arg(value, found.append)
    return found
