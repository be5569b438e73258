"""Counts the activations that a model runs, told by its ATen calls alone: the yardstick for what the FX pass finds.

A tensor is known by where it lies, so a formula is seen however, and in whichever modules, it was written. Nothing of
the pass is used here.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# A number, the name of a tensor, or an ATen op over formulas. A name stands for one tensor, another name for another.
Formula = Any

_CUBIC = ("add", "x", ("mul", ("pow", "x", 3), 0.044715))
_HALF = ("mul", "x", 0.5)
_RELU = ("relu", "x")
_UP = ("clamp", "up", -7.0, 7.0)
_GATE = ("clamp", "gate", None, 7.0)
_XIELU_NEGATIVE = ("mul", ("sub", ("expm1", ("minimum", "x", "eps")), "x"), ("add", "beta", ("softplus", "alpha_n")))
_XIELU_POSITIVE = ("mul", ("mul", ("softplus", "alpha_p"), "x"), "x")
_LINEAR = ("mul", "beta", "x")

FORMULAS: tuple[tuple[str, Formula], ...] = (
    ("silu", ("silu", "x")),
    ("gelu", ("gelu", "x")),
    ("gelu_tanh", ("gelu_tanh", "x")),
    ("relu_mul", ("mul", ("relu", "gate"), "up")),
    ("relu_squared", ("pow", _RELU, 2)),
    ("relu_squared", ("mul", _RELU, _RELU)),
    ("gelu_new", ("mul", _HALF, ("add", ("tanh", ("mul", _CUBIC, 0.7978845608028654)), 1.0))),
    ("gelu_quick", ("mul", "x", ("sigmoid", ("mul", "x", 1.702)))),
    ("star_relu", ("add", ("mul", ("pow", _RELU, 2), "scale"), "bias")),
    (
        "xielu",
        ("where", ("gt", "x", 0), ("add", _XIELU_POSITIVE, _LINEAR), ("add", _XIELU_NEGATIVE, _LINEAR)),
    ),
    ("swigluoai_and_mul", ("mul", ("add", _UP, 1), ("mul", _GATE, ("sigmoid", ("mul", _GATE, 1.702))))),
    ("silu_mul", ("mul", ("silu", "gate"), "up")),
    ("gelu_mul", ("mul", ("gelu", "gate"), "up")),
    ("gelu_tanh_mul", ("mul", ("gelu_tanh", "gate"), "up")),
    ("relu_squared_mul", ("mul", ("pow", ("relu", "gate"), 2), "up")),
)
# The gate and then the up half of one tensor, and the reverse.
PACKED = {
    "silu_mul": ("silu_and_mul", "mul_and_silu"),
    "gelu_mul": ("gelu_and_mul", "gelu_mul"),
    "gelu_tanh_mul": ("gelu_tanh_and_mul", "gelu_tanh_mul"),
    "relu_squared_mul": ("relu_squared_and_mul", "relu_squared_mul"),
}
COMMUTE = ("add", "mul", "minimum")


@dataclass(eq=False)
class Value:
    """A tensor as one op computed it of its operands; "" where that is not known."""

    tensor: torch.Tensor
    op: str = ""
    operands: tuple[Any, ...] = ()


class ActivationCounter(TorchDispatchMode):
    """Within it, ``executed()`` counts the formulas that are run, each by its name; of two that overlap, the longer."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[int, dict[Any, Value]] = {}  # by storage, then by place in it
        self.kept: list[torch.Tensor] = []  # so that no memory is used again
        self.found: dict[Value, str] = {}

    def executed(self) -> Counter[str]:
        return Counter(self.found.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op, operands = func.overloadpacket.__name__.removesuffix("_"), tuple(map(self._value, args))
        if op == "gelu" and (kwargs or {}).get("approximate") == "tanh":
            op = "gelu_tanh"
        out = func(*args, **(kwargs or {}))
        for argument, arg in zip(func._schema.arguments, args):
            if argument.is_write and isinstance(arg, torch.Tensor):
                self.values[_storage(arg)] = {}
        if isinstance(out, torch.Tensor) and not func.is_view:
            self._count(self._keep(out, op, operands))
        return out

    def _value(self, arg: Any) -> Any:
        if not isinstance(arg, torch.Tensor):
            return arg
        return self.values.get(_storage(arg), {}).get(_place(arg)) or self._keep(arg)

    def _keep(self, tensor: torch.Tensor, op: str = "", operands: tuple[Any, ...] = ()) -> Value:
        self.kept.append(tensor)
        value = Value(tensor, op, operands)
        self.values.setdefault(_storage(tensor), {})[_place(tensor)] = value
        return value

    def _count(self, value: Value) -> None:
        for name, formula in FORMULAS:
            for names, covered in itertools.islice(_readings(formula, value, ({}, ())), 1):
                for inner in covered:
                    self.found.pop(inner, None)
                self.found[value] = _by_packing(name, names)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _place(tensor: torch.Tensor) -> Any:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _by_packing(name: str, names: dict[str, Value]) -> str:
    """``name``, or what it is called where gate and up are the halves of one tensor's last dimension."""
    if name not in PACKED:
        return name
    gate, up = names["gate"].tensor, names["up"].tensor
    apart = up.storage_offset() - gate.storage_offset()
    if _storage(gate) != _storage(up) or abs(apart) != gate.shape[-1]:
        return name
    return PACKED[name][apart < 0]


Reading = tuple[dict[str, Value], tuple[Value, ...]]


def _readings(formula: Formula, value: Any, reading: Reading) -> Iterator[Reading]:
    """Every way to read ``value`` as ``formula``: the tensors by their names, and the values that were computed."""
    names, covered = reading
    if isinstance(formula, str):
        others = [other for name, other in names.items() if name != formula]
        if isinstance(value, Value) and names.get(formula, value) is value and value not in others:
            yield {**names, formula: value}, covered
    elif not isinstance(formula, tuple):
        if not isinstance(value, Value) and value == formula:
            yield reading
    elif isinstance(value, Value) and value.op == formula[0] and len(value.operands) >= len(formula) - 1:
        orders = [value.operands, value.operands[::-1]] if value.op in COMMUTE else [value.operands]
        for operands in orders:
            readings = [(names, (*covered, value))]
            for part, operand in zip(formula[1:], operands):
                readings = [longer for shorter in readings for longer in _readings(part, operand, shorter)]
            yield from readings
