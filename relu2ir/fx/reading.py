"""A node of a graph read as a primitive of its operands, by the table in `spellings`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.fx import Node

from relu2ir.fx.spellings import KEYWORDS, NEUTRAL, OTHERS, ROWS, SYMBOLS, Row, is_number

Operand: TypeAlias = Node | int | float

# What a node calls: the primitives that it may be, as their settings say, and whether it writes in place.
_CALLED: dict[tuple[str, Any], list[tuple[str, bool]]] = {}
_MODULES: dict[type[nn.Module], list[str]] = {}
_TABLE: dict[str, Row] = {**ROWS, **OTHERS}
for _name, _entry in _TABLE.items():
    for _kind, _targets, _inplace in (
        ("call_function", _entry.functions, False),
        ("call_function", _entry.inplace, True),
        ("call_method", _entry.methods, False),
        ("call_method", [f"{method}_" for method in _entry.methods], True),
    ):
        for _target in _targets:
            _CALLED.setdefault((_kind, _target), []).append((_name, _inplace))
    for _module in _entry.modules:
        _MODULES.setdefault(_module, []).append(_name)


@dataclass(frozen=True)
class Spelled:
    """A node read as a primitive of its operands. ``template`` writes it as the user did, over the operands' texts."""

    primitive: str
    operands: tuple[Operand, ...]
    template: str
    inplace: bool = False
    altered: bool = False

    @property
    def by_operator(self) -> bool:
        """Written with an operator, which Python numbers have too: no evidence that an operand is a tensor."""
        return self.template in SYMBOLS.values()

    def text(self, operands: list[str]) -> str:
        """The spelling over the texts of its operands, bracketed where an operator or a method needs it."""
        binds = self.by_operator or self.template.startswith("{")
        return self.template.format(*(f"({text})" if binds and " " in text else text for text in operands))


def spelled(node: Node, root: nn.Module) -> Spelled | None:
    """``node`` of a graph over ``root`` as a primitive, or None when it is none."""
    if node.op == "call_module":
        return _spelled_module(node, root.get_submodule(str(node.target)))
    for name, inplace in _CALLED.get((node.op, node.target), ()):
        found = _spelled_call(node, name, inplace)
        if found is not None:
            return found
    return None


def _spelled_module(node: Node, module: nn.Module) -> Spelled | None:
    computed = computed_by(module)
    if computed is None or len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], Node):
        return None
    name, numbers = computed
    template, inplace = f"nn.{type(module).__name__}()({{0}})", getattr(module, "inplace", False)
    return _read(name, (*node.args, *numbers), template, inplace, is_altered(module))


def computed_by(module: nn.Module) -> tuple[str, tuple[Any, ...]] | None:
    """The row of what a layer of torch computes as it is set now, and the operands that it holds."""
    for name in _MODULES.get(type(module), ()):
        row = _TABLE[name]
        if all(getattr(module, key, None) == value for key, (_, value) in row.settings.items()):
            return name, tuple(getattr(module, parameter) for parameter in row.parameters[1:])
    return None


def _spelled_call(node: Node, name: str, inplace: bool) -> Spelled | None:
    row = _TABLE[name]
    values = _values(node, row)
    if values is None or any(values.pop(key, default) != value for key, (default, value) in row.settings.items()):
        return None
    inplace = bool(inplace or values.pop("inplace", False))
    operands = tuple(values.pop(parameter, None) for parameter in row.parameters)
    values = {keyword: value for keyword, value in values.items() if keyword not in row.ignored}
    if any(keyword not in NEUTRAL or value != NEUTRAL[keyword] for keyword, value in values.items()):
        return None
    return _read(name, operands, _template(node, row, operands), inplace)


def _read(name: str, operands: tuple[Any, ...], template: str, inplace: bool, altered: bool = False) -> Spelled | None:
    """The row ``name`` over its operands as a primitive; None where one is no tensor and no number."""
    row = _TABLE[name]
    read = (name, operands) if row.reads is None else row.reads(*operands)
    if read is None or not all(isinstance(operand, Node) or is_number(operand) for operand in read[1]):
        return None
    return Spelled(*read, template, inplace, altered)


def _values(node: Node, row: Row) -> dict[str, Any] | None:
    """The arguments of a call by keyword; None when there are more than the row knows."""
    args = list(node.args)
    if node.op == "call_method":
        args.insert(row.self_at, args.pop(0))
    names = (*row.parameters, *row.extras, *row.settings)
    if len(args) > len(names):
        return None
    return dict(zip(names, args)) | {KEYWORDS.get(name, name): value for name, value in node.kwargs.items()}


def _template(node: Node, row: Row, operands: tuple[Any, ...]) -> str:
    if node.target in SYMBOLS:
        return SYMBOLS[node.target]
    # In the order of what they read: of rsub the second comes first, of clamp a missing bound is left out.
    read = row.reads(*operands) if row.reads is not None else None
    order = operands if read is None else read[1]
    slots = [f"{{{order.index(o)}}}" if o in order else repr(o) for o in operands]
    slots = [slot if o is not None else "None" for slot, o in zip(slots, operands)]
    if node.op == "call_method":
        return f"{slots.pop(row.self_at)}.{node.target}({', '.join(slots)})"
    return f"{function_name(node.target)}({', '.join(slots)})"


def function_name(target: Any) -> str:
    """``F.relu``, ``torch.square``, ``aten.relu.default``: a call_function target as a reader knows it."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    module = "F" if getattr(target, "__module__", "") == "torch.nn.functional" else "torch"
    return f"{module}.{getattr(target, '__name__', target)}"


def is_altered(module: nn.Module) -> bool:
    """Whether calling ``module`` does anything but run its class's ``forward``."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    own_call = type(module).__call__ is not nn.Module.__call__
    return own_call or has_own_forward(module) or any(getattr(module, kind) for kind in kinds)


def has_own_forward(module: nn.Module) -> bool:
    """Whether ``module`` itself holds a ``forward`` that is not the one of its class."""
    bound = vars(module).get("forward")
    return bound is not None and getattr(bound, "__func__", None) is not type(module).forward
