"""How graphs write each primitive: one table, one row per primitive, read by `reading.spelled`.

Symbolic traces hold ``torch.relu``, ``.relu()`` and ``nn.ReLU``; Dynamo adds keyword arguments (``F.relu(x,
inplace=False)``); torch.export gives ATen overloads. A row names them all: nothing else in the pass knows a spelling.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

aten = torch.ops.aten


@dataclass(frozen=True)
class Row:
    """The spellings of one primitive. Modules hold operands behind their first in attributes of the same names.

    ``parameters`` are its operands in order, by their keyword; ``extras`` further positional ones. ``functions`` are
    call_function targets, ``inplace`` those that write into their first operand; ``methods`` are Tensor methods, of
    which the form with ``_`` writes in place, and ``self_at`` says which operand a method is called on. ``modules`` are
    nn.Module classes without parameters. ``settings`` are arguments, and attributes of modules, by their default and
    the value that they must have to mean this primitive. ``reads`` gives what the operands say, as a primitive and its
    operands, where that is not the row's own name; None if it is no primitive. ``ignored`` keywords do not change what
    a number is.
    """

    parameters: tuple[str, ...]
    functions: tuple[Callable[..., Any], ...]
    methods: tuple[str, ...] = ()
    modules: tuple[type[nn.Module], ...] = ()
    inplace: tuple[Callable[..., Any], ...] = ()
    extras: tuple[str, ...] = ()
    self_at: int = 0
    settings: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    reads: Callable[..., tuple[str, tuple[Any, ...]] | None] | None = None
    ignored: tuple[str, ...] = ()


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


def is_number(value: Any) -> bool:
    """A literal that can be an operand: a float, or an int that is one exactly; ``True`` is not 1 here."""
    return isinstance(value, float) or (type(value) is int and abs(value) <= 2**53)


def _unary(name: str, *modules: type[nn.Module]) -> Row:
    functions = (getattr(torch, name), *filter(None, [getattr(torch.special, name, None), getattr(F, name, None)]))
    overload, inplace = getattr(aten, name), getattr(aten, f"{name}_")
    return Row(
        UNARY, (*functions, overload.default), (name,), modules, inplace=(getattr(torch, f"{name}_"), inplace.default)
    )


def _bounded(x: Any, low: Any, high: Any) -> tuple[str, tuple[Any, ...]]:
    """A clamp by the bounds that it has: ``clamp(x, max=7)`` is clamp_max."""
    if low is None:
        return "clamp_max", (x, high)
    return ("clamp_min", (x, low)) if high is None else ("clamp", (x, low, high))


def _of_two(name: str) -> Callable[..., tuple[str, tuple[Any, ...]] | None]:
    """``torch.max`` of two tensors is a maximum; of a tensor and a number it reduces a dimension."""
    return lambda x, other: (name, (x, other)) if isinstance(other, Node) else None


ROWS: Mapping[str, Row] = {
    "neg": Row(
        UNARY, (operator.neg, torch.neg, torch.negative, aten.neg.default, aten.negative.default), ("neg", "negative")
    ),
    "add": Row(
        BINARY,
        (operator.add, torch.add, aten.add.Tensor, aten.add.Scalar),
        ("add",),
        inplace=(operator.iadd, aten.add_.Tensor, aten.add_.Scalar),
    ),
    "sub": Row(
        BINARY,
        (operator.sub, torch.sub, torch.subtract, aten.sub.Tensor, aten.sub.Scalar, aten.subtract.Tensor),
        ("sub", "subtract"),
        inplace=(operator.isub, aten.sub_.Tensor, aten.sub_.Scalar),
    ),
    "mul": Row(
        BINARY,
        (operator.mul, torch.mul, torch.multiply, aten.mul.Tensor, aten.mul.Scalar, aten.multiply.Tensor),
        ("mul", "multiply"),
        inplace=(operator.imul, aten.mul_.Tensor, aten.mul_.Scalar),
    ),
    "div": Row(
        BINARY,
        (
            operator.truediv,
            torch.div,
            torch.divide,
            torch.true_divide,
            aten.div.Tensor,
            aten.div.Scalar,
            aten.divide.Tensor,
            aten.true_divide.Tensor,
        ),
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
    **{name: _unary(name) for name in ("sqrt", "exp", "expm1", "log1p", "erf", "erfc")},
    "tanh": _unary("tanh", nn.Tanh),
    "abs": Row(
        UNARY,
        (operator.abs, torch.abs, torch.absolute, aten.abs.default, aten.absolute.default),
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
        (torch.clamp, torch.clip, aten.clamp.default, aten.clamp.Tensor, aten.clip.default),
        ("clamp", "clip"),
        inplace=(torch.clamp_, torch.clip_, aten.clamp_.default, aten.clamp_.Tensor),
        reads=_bounded,
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

_MADE = ("dtype", "layout", "device", "pin_memory", "memory_format", "requires_grad")

# What is no primitive by its own name: `forms` knows what a power, a threshold and a hardtanh are.
OTHERS: Mapping[str, Row] = {
    "pow": Row(
        ("input", "exponent"),
        (operator.pow, torch.pow, aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor),
        ("pow",),
        inplace=(operator.ipow, aten.pow_.Scalar, aten.pow_.Tensor),
    ),
    "float_power": Row(("input", "exponent"), (torch.float_power, aten.float_power.Tensor_Scalar), ("float_power",)),
    "rsub": Row(BINARY, (torch.rsub, aten.rsub.Tensor, aten.rsub.Scalar), reads=lambda x, other: ("sub", (other, x))),
    "max": Row(BINARY, (torch.max, aten.max.other), ("max",), reads=_of_two("maximum")),
    "min": Row(BINARY, (torch.min, aten.min.other), ("min",), reads=_of_two("minimum")),
    "hardtanh": Row(
        ("input", "min_val", "max_val"),
        (F.hardtanh, aten.hardtanh.default),
        modules=(nn.Hardtanh,),
        inplace=(F.hardtanh_, aten.hardtanh_.default),
        extras=("inplace",),
        reads=lambda x, low, high: ("hardtanh", (x, -1 if low is None else low, 1 if high is None else high)),
    ),
    "relu6": Row(
        UNARY,
        (F.relu6, aten.relu6.default),
        modules=(nn.ReLU6,),
        inplace=(aten.relu6_.default,),
        extras=("inplace",),
        reads=lambda x: ("hardtanh", (x, 0, 6)),
    ),
    "threshold": Row(
        ("input", "threshold", "value"),
        (torch.threshold, F.threshold, aten.threshold.default),
        modules=(nn.Threshold,),
        inplace=(aten.threshold_.default,),
        extras=("inplace",),
    ),
    # One number in every element.
    "zeros_like": Row(
        UNARY,
        (torch.zeros_like, aten.zeros_like.default),
        reads=lambda like: ("const", (0,)),
        ignored=_MADE,
    ),
    "full_like": Row(
        ("input", "fill_value"),
        (torch.full_like, aten.full_like.default),
        reads=lambda like, value: ("const", (value,)),
        ignored=_MADE,
    ),
    "full": Row(
        ("size", "fill_value"),
        (torch.full, aten.full.default),
        reads=lambda size, value: ("const", (value,)),
        ignored=_MADE,
    ),
    "zeros": Row(("size",), (torch.zeros, aten.zeros.default), reads=lambda size: ("const", (0,)), ignored=_MADE),
    "new_zeros": Row(
        ("input", "size"),
        (aten.new_zeros.default,),
        ("new_zeros",),
        reads=lambda like, size: ("const", (0,)),
        ignored=_MADE,
    ),
    "scalar_tensor": Row(
        ("s",),
        (torch.scalar_tensor, torch.tensor, aten.scalar_tensor.default),
        reads=lambda value: ("const", (value,)),
        ignored=_MADE,
    ),
}


SYMBOLS = (
    {operator.neg: "-{0}", operator.pow: "{0} ** {1}", operator.ipow: "{0} **= {1}"}
    | {
        getattr(operator, prefix + name): f"{{0}} {symbol}{'=' * bool(prefix)} {{1}}"
        for name, symbol in (("add", "+"), ("sub", "-"), ("mul", "*"), ("truediv", "/"))
        for prefix in ("", "i")
    }
    | {getattr(operator, n): f"{{0}} {s} {{1}}" for n, s in (("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="))}
)
KEYWORDS = {"self": "input"}
# Keywords that change nothing at these values.
NEUTRAL = {"alpha": 1, "out": None, "rounding_mode": None}
