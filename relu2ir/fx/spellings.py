"""How graphs write each primitive: one table, one row per primitive, read by `spelled`.

Symbolic traces hold ``torch.relu``, ``.relu()`` and ``nn.ReLU``; Dynamo adds keyword arguments (``F.relu(x,
inplace=False)``); torch.export gives ATen overloads. A row names them all: nothing else in the pass knows a spelling.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

aten = torch.ops.aten
Operand: TypeAlias = Node | int | float


@dataclass(frozen=True)
class Row:
    """The spellings of one primitive.

    ``parameters`` are its operands in order, by their keyword; ``extras`` further positional ones. ``functions`` are
    call_function targets, ``inplace`` those that write into their first operand; ``methods`` are Tensor methods, of
    which the form with ``_`` writes in place, and ``self_at`` says which operand a method is called on. ``modules`` are
    nn.Module classes without parameters. ``settings`` are arguments, and attributes of modules, by their default and
    the value that they must have to mean this primitive.
    """

    parameters: tuple[str, ...]
    functions: tuple[Callable[..., Any], ...]
    methods: tuple[str, ...] = ()
    modules: tuple[type[nn.Module], ...] = ()
    inplace: tuple[Callable[..., Any], ...] = ()
    extras: tuple[str, ...] = ()
    self_at: int = 0
    settings: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)


UNARY, BINARY = ("input",), ("input", "other")


def _comparison(name: str, *names: str) -> Row:
    overload = getattr(aten, name)
    functions = (
        getattr(operator, name),
        *(getattr(torch, n) for n in (name, *names)),
        overload.Tensor,
        overload.Scalar,
    )
    return Row(BINARY, functions, (name, *names))


def _unary(name: str, *modules: type[nn.Module]) -> Row:
    functions = (getattr(torch, name), *filter(None, [getattr(torch.special, name, None), getattr(F, name, None)]))
    overload, inplace = getattr(aten, name), getattr(aten, f"{name}_")
    return Row(
        UNARY, (*functions, overload.default), (name,), modules, inplace=(getattr(torch, f"{name}_"), inplace.default)
    )


# "pow" is no primitive: with the number 2 it is a square, with any other `spelled` does not read it.
ROWS: Mapping[str, Row] = {
    "neg": Row(UNARY, (operator.neg, torch.neg, torch.negative, aten.neg.default), ("neg", "negative")),
    "add": Row(
        BINARY,
        (operator.add, torch.add, aten.add.Tensor, aten.add.Scalar),
        ("add",),
        inplace=(operator.iadd, aten.add_.Tensor, aten.add_.Scalar),
    ),
    "sub": Row(
        BINARY,
        (operator.sub, torch.sub, torch.subtract, aten.sub.Tensor, aten.sub.Scalar),
        ("sub", "subtract"),
        inplace=(operator.isub, aten.sub_.Tensor, aten.sub_.Scalar),
    ),
    "mul": Row(
        BINARY,
        (operator.mul, torch.mul, torch.multiply, aten.mul.Tensor, aten.mul.Scalar),
        ("mul", "multiply"),
        inplace=(operator.imul, aten.mul_.Tensor, aten.mul_.Scalar),
    ),
    "div": Row(
        BINARY,
        (operator.truediv, torch.div, torch.divide, torch.true_divide, aten.div.Tensor, aten.div.Scalar),
        ("div", "divide", "true_divide"),
        inplace=(operator.itruediv, aten.div_.Tensor, aten.div_.Scalar),
    ),
    "lt": _comparison("lt", "less"),
    "le": _comparison("le", "less_equal"),
    "gt": _comparison("gt", "greater"),
    "ge": _comparison("ge", "greater_equal"),
    "where": Row(
        ("condition", "input", "other"),
        (torch.where, aten.where.self, aten.where.Scalar, aten.where.ScalarOther, aten.where.ScalarSelf),
        ("where",),
        self_at=1,
    ),
    "square": Row(
        UNARY, (torch.square, aten.square.default), ("square",), inplace=(torch.square_, aten.square_.default)
    ),
    "pow": Row(
        ("input", "exponent"),
        (operator.pow, torch.pow, aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor),
        ("pow",),
        inplace=(operator.ipow, aten.pow_.Scalar, aten.pow_.Tensor),
    ),
    **{name: _unary(name) for name in ("sqrt", "exp", "expm1", "log1p", "erf", "erfc")},
    "tanh": _unary("tanh", nn.Tanh),
    "abs": Row(
        UNARY,
        (operator.abs, torch.abs, torch.absolute, aten.abs.default),
        ("abs", "absolute"),
        inplace=(torch.abs_, aten.abs_.default),
    ),
    "minimum": Row(BINARY, (torch.minimum, aten.minimum.default), ("minimum",)),
    "maximum": Row(BINARY, (torch.maximum, aten.maximum.default), ("maximum",)),
    "clamp_min": Row(
        ("input", "min"),
        (torch.clamp_min, aten.clamp_min.default, aten.clamp_min.Tensor),
        ("clamp_min",),
        inplace=(torch.clamp_min_, aten.clamp_min_.default, aten.clamp_min_.Tensor),
    ),
    "clamp_max": Row(
        ("input", "max"),
        (torch.clamp_max, aten.clamp_max.default, aten.clamp_max.Tensor),
        ("clamp_max",),
        inplace=(torch.clamp_max_, aten.clamp_max_.default, aten.clamp_max_.Tensor),
    ),
    "clamp": Row(
        ("input", "min", "max"),
        (torch.clamp, torch.clip, aten.clamp.default, aten.clamp.Tensor),
        ("clamp", "clip"),
        inplace=(torch.clamp_, torch.clip_, aten.clamp_.default, aten.clamp_.Tensor),
    ),
    "relu": Row(
        UNARY,
        (torch.relu, F.relu, aten.relu.default),
        ("relu",),
        (nn.ReLU,),
        inplace=(torch.relu_, F.relu_, aten.relu_.default),
        extras=("inplace",),
    ),
    "sigmoid": _unary("sigmoid", nn.Sigmoid),
    "silu": Row(
        UNARY, (F.silu, aten.silu.default), modules=(nn.SiLU,), inplace=(aten.silu_.default,), extras=("inplace",)
    ),
    "softplus": Row(
        UNARY,
        (F.softplus, aten.softplus.default),
        modules=(nn.Softplus,),
        settings={"beta": (1, 1), "threshold": (20, 20)},
    ),
    "gelu": Row(UNARY, (F.gelu, aten.gelu.default), modules=(nn.GELU,), settings={"approximate": ("none", "none")}),
    "gelu_tanh": Row(
        UNARY, (F.gelu, aten.gelu.default), modules=(nn.GELU,), settings={"approximate": ("none", "tanh")}
    ),
}

_SYMBOLS = (
    {operator.neg: "-{0}", operator.pow: "{0} ** {1}", operator.ipow: "{0} **= {1}"}
    | {
        getattr(operator, prefix + name): f"{{0}} {symbol}{'=' * bool(prefix)} {{1}}"
        for name, symbol in (("add", "+"), ("sub", "-"), ("mul", "*"), ("truediv", "/"))
        for prefix in ("", "i")
    }
    | {getattr(operator, n): f"{{0}} {s} {{1}}" for n, s in (("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="))}
)
_KEYWORDS = {"self": "input"}
# Keywords that change nothing at these values.
_NEUTRAL = {"alpha": 1, "out": None, "rounding_mode": None}

# What a node calls: the primitives that it may be, as their settings say, and whether it writes in place.
_CALLED: dict[tuple[str, Any], list[tuple[str, bool]]] = {}
_MODULES: dict[type[nn.Module], list[str]] = {}
for _name, _row in ROWS.items():
    for _kind, _targets, _inplace in (
        ("call_function", _row.functions, False),
        ("call_function", _row.inplace, True),
        ("call_method", _row.methods, False),
        ("call_method", [f"{method}_" for method in _row.methods], True),
    ):
        for _target in _targets:
            _CALLED.setdefault((_kind, _target), []).append((_name, _inplace))
    for _module in _row.modules:
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
        return self.template in _SYMBOLS.values()

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
    name = primitive_of(module)
    if name is None or len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], Node):
        return None
    template = f"nn.{type(module).__name__}()({{0}})"
    return Spelled(name, (node.args[0],), template, getattr(module, "inplace", False), is_altered(module))


def primitive_of(module: nn.Module) -> str | None:
    """The primitive that a layer of torch computes as it is set now."""
    for name in _MODULES.get(type(module), ()):
        if all(getattr(module, key, None) == value for key, (_, value) in ROWS[name].settings.items()):
            return name
    return None


def _spelled_call(node: Node, name: str, inplace: bool) -> Spelled | None:
    row = ROWS[name]
    values = _values(node, row)
    if values is None or any(values.pop(key, default) != value for key, (default, value) in row.settings.items()):
        return None
    inplace = bool(inplace or values.pop("inplace", False))
    operands = tuple(values.pop(parameter, None) for parameter in row.parameters)
    if any(keyword not in _NEUTRAL or value != _NEUTRAL[keyword] for keyword, value in values.items()):
        return None
    template = _template(node, len(operands), row.self_at)
    if name == "clamp":
        name, operands, template = _with_bounds(operands, template)
    if not all(isinstance(operand, Node) or is_number(operand) for operand in operands):
        return None
    if name == "pow" and is_number(operands[1]) and operands[1] not in (2, 3):
        return None
    return Spelled(name, operands, template, inplace)


def _with_bounds(operands: tuple[Any, ...], template: str) -> tuple[str, tuple[Any, ...], str]:
    """A clamp by the bounds that it has: ``clamp(x, max=7)`` is clamp_max."""
    x, low, high = operands
    if low is None:
        return "clamp_max", (x, high), template.replace("{1}, {2}", "max={1}")
    if high is None:
        return "clamp_min", (x, low), template.replace("{1}, {2}", "min={1}")
    return "clamp", operands, template


def _values(node: Node, row: Row) -> dict[str, Any] | None:
    """The arguments of a call by keyword; None when there are more than the row knows."""
    args = list(node.args)
    if node.op == "call_method":
        args.insert(row.self_at, args.pop(0))
    names = (*row.parameters, *row.extras, *row.settings)
    if len(args) > len(names):
        return None
    return dict(zip(names, args)) | {_KEYWORDS.get(name, name): value for name, value in node.kwargs.items()}


def _template(node: Node, arity: int, self_at: int) -> str:
    if node.target in _SYMBOLS:
        return _SYMBOLS[node.target]
    slots = [f"{{{i}}}" for i in range(arity)]
    if node.op == "call_method":
        return f"{slots.pop(self_at)}.{node.target}({', '.join(slots)})"
    return f"{function_name(node.target)}({', '.join(slots)})"


def function_name(target: Any) -> str:
    """``F.relu``, ``torch.square``, ``aten.relu.default``: a call_function target as a reader knows it."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    module = "F" if getattr(target, "__module__", "") == "torch.nn.functional" else "torch"
    return f"{module}.{getattr(target, '__name__', target)}"


def is_number(value: Any) -> bool:
    """A literal that can be an operand: a float, or an int that is one exactly; ``True`` is not 1 here."""
    return isinstance(value, float) or (type(value) is int and abs(value) <= 2**53)


def is_altered(module: nn.Module) -> bool:
    """Whether calling ``module`` does anything but run its class's ``forward``."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    own_call = type(module).__call__ is not nn.Module.__call__
    return own_call or has_own_forward(module) or any(getattr(module, kind) for kind in kinds)


def has_own_forward(module: nn.Module) -> bool:
    """Whether ``module`` itself holds a ``forward`` that is not the one of its class."""
    bound = vars(module).get("forward")
    return bound is not None and getattr(bound, "__func__", None) is not type(module).forward
