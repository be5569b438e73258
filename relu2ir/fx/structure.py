"""Copies of modules and graphs that share every tensor: fusing and lowering leave what they were given alone."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Mapping
from types import MethodType
from typing import Any, Protocol, runtime_checkable

from torch import fx, nn
from torch.nn.modules.module import _WrappedHook


@runtime_checkable
class Owned(Protocol):
    """A value in a module's attributes that belongs to that module."""

    def of(self, owner: nn.Module) -> object:
        """The same for a copy of the module."""


def copy_structure(
    module: nn.Module, children: Mapping[str, nn.Module | None], graph: fx.Graph | None = None
) -> nn.Module:
    """A module like ``module`` with other children: same class, same tensors, own hooks, flags and tables.

    What its attributes and hooks hold of other modules is for `relink`, once all are copied. A graph module gets
    ``graph``, or a copy of its own.
    """
    is_graph, kind = isinstance(module, fx.GraphModule), type(module)
    new = fx.GraphModule.__new__(kind) if is_graph else object.__new__(kind)
    state = dict(vars(module))
    for name, value in state.items():
        if name in ("_parameters", "_buffers", "_non_persistent_buffers_set") or "_hooks" in name:
            state[name] = copy.copy(value)
        elif isinstance(value, Owned):
            state[name] = value.of(new)
    state.pop("_compiled_call_impl", None)  # Module.compile() leaves the compiled call of the original
    vars(new).update(state | {"_modules": dict(children)})
    for name in (name for each in kind.__mro__ for name in getattr(each, "__slots__", ())):
        if hasattr(module, name):
            setattr(new, name, getattr(module, name))
    if is_graph:
        new.graph = copy_graph(module.graph) if graph is None else graph
    return new


def relink(copies: Mapping[int, nn.Module]) -> None:
    """Make the copies, each by the id of its original, refer to one another where the originals did.

    Beside its children a module may hold modules in plain attributes and containers, and their methods as hooks.
    """
    copies = {original: new for original, new in copies.items() if id(new) != original}  # some are left as they are
    for new in copies.values():
        for name, value in vars(new).items():
            if name != "_modules":
                vars(new)[name] = _relinked(value, copies)


def _relinked(value: Any, copies: Mapping[int, nn.Module]) -> Any:
    """``value``, itself where it holds no original."""
    if isinstance(value, nn.Module):
        return copies.get(id(value), value)
    if isinstance(value, MethodType):
        owner = copies.get(id(value.__self__))
        return value if owner is None else MethodType(value.__func__, owner)
    if isinstance(value, functools.partial):  # accelerate patches a forward with one
        parts = _relinked([value.func, value.args, value.keywords], copies)
        if all(new is old for new, old in zip(parts, (value.func, value.args, value.keywords), strict=True)):
            return value
        again = functools.partial(parts[0], *parts[1], **parts[2])
        vars(again).update(_relinked(vars(value), copies))
        return again
    if isinstance(value, _WrappedHook):
        hook, module = _relinked(value.hook, copies), value.module() if value.with_module else None
        return _WrappedHook(hook, None if module is None else copies.get(id(module), module))
    if type(value) in (dict, OrderedDict):
        members = {key: _relinked(member, copies) for key, member in value.items()}
        same = all(member is value[key] for key, member in members.items())
        return value if same else type(value)(members)
    if type(value) in (list, tuple):
        items = [_relinked(item, copies) for item in value]
        same = all(new is old for new, old in zip(items, value, strict=True))
        return value if same else type(value)(items)
    return value


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """The same nodes; what their ``meta`` holds is shared."""
    new = fx.Graph(tracer_cls=graph._tracer_cls)
    nodes: dict[fx.Node, fx.Node] = {}
    copied = new.graph_copy(graph, nodes, return_output_node=True)
    for old, node in nodes.items():
        node.name = old.name  # fx itself calls an 'input' of torch.export 'input_1'
        # Dynamo leaves the source of each input in an attribute of its own, and AOTAutograd insists on it.
        if hasattr(old, "_dynamo_source"):
            node._dynamo_source = old._dynamo_source
    if copied is not None:
        value, output = copied
        new.output(value, type_expr=output.type).meta = copy.copy(output.meta)
    new.set_codegen(graph._codegen)
    return new
