"""Every op as a layer: ``relu2ir.nn.ReLUSquared()``. Classes are derived from the specs when first asked for.

A layer holds its op's name, never an op object, so it pickles and deep-copies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from relu2ir import library
from relu2ir.registry import provider
from relu2ir.spec import OpSpec

# How the field writes the words of op names; any other word is capitalised.
_WORDS = {
    **{"relu": "ReLU", "silu": "SiLU", "gelu": "GELU", "xielu": "XIELU", "fatrelu": "FATReLU", "situ": "SiTU"},
    **{"swiglu": "SwiGLU", "geglu": "GEGLU", "swigluoai": "SwigluOAI", "swiglustep": "SwigluStep"},
}


class Activation(torch.nn.Module):
    """A layer that dispatches one op; its subclasses fix which. No parameters: the op's params are plain numbers."""

    op: str
    function: Callable[..., Any]

    def __init__(self, **params: float) -> None:
        super().__init__()
        spec = library.find(self.op)
        unknown = [name for name in params if name not in spec.params]
        if unknown:
            raise TypeError(
                f"{type(self).__name__} takes ({', '.join(spec.params) or 'nothing'}); found {unknown[0]!r}"
            )
        self.params = {name: float(params.get(name, default)) for name, default in spec.params.items()}

    def forward(self, *tensors: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        """The op by the chosen provider: the platform's row, or what an override asks for.

        The operand of an op of one may come by any keyword: a layer can stand where a module of the user's stood.
        """
        if named and len(named) + len(tensors) == 1:
            tensors, named = tuple(named.values()), {}
        return self.function(*tensors, **named, **self.params)

    def forward_native(self, *tensors: torch.Tensor) -> torch.Tensor:
        """The reference: the op's expression in plain PyTorch."""
        return provider("native", "").lower(library.find(self.op))(*tensors, *self.params.values())

    def extra_repr(self) -> str:
        params = "".join(f", {name}={value!r}" for name, value in self.params.items())
        return f"{library.find(self.op).formula}{params}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.op,), self.__dict__


def _restore(op: str) -> Activation:
    kind = layer_for(library.find(op))
    return kind.__new__(kind)


def class_name(spec: OpSpec) -> str:
    """``relu_squared`` is ``ReLUSquared``, ``silu_and_mul`` is ``SiLUAndMul``."""
    return "".join(_WORDS.get(word, word.capitalize()) for word in spec.name.split("_"))


@cache
def layer_for(spec: OpSpec) -> type[Activation]:
    """The layer class of ``spec``."""

    def forward(self: Activation, *tensors: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        return Activation.forward(self, *tensors, **named)

    # What inspect.signature and symbolic_trace, which cannot follow *tensors, take the arguments from.
    names = ", ".join(input.name for input in spec.inputs)
    forward.__wrapped__ = eval(compile(f"lambda self, {names}: ...", __file__, "eval"))  # type: ignore[attr-defined]
    members = {
        "forward": forward,
        "op": spec.qualname,
        "function": staticmethod(library.function(spec.qualname)),
        "__doc__": f"{spec.doc}\n\n{spec.formula}",
        "__module__": __name__,
    }
    return type(class_name(spec), (Activation,), members)


def __getattr__(name: str) -> type[Activation]:
    for spec in library.specs():
        if class_name(spec) == name:
            return layer_for(spec)
    raise AttributeError(f"module {__name__!r} has no layer {name!r}; layers: {', '.join(__dir__())}")


def __dir__() -> list[str]:
    return [class_name(spec) for spec in library.specs()]
