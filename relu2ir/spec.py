"""Op specs: what one verified entry of a spec file says, and the gradient op that follows from it. Needs no torch.

Reading a file is `specfile.py`; this module is the value that comes out.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cached_property
from types import MappingProxyType
from typing import Any

from relu2ir.ir.expr import Call, Const, Expr, Name, format_number, postorder
from relu2ir.ir.gradient import gradient, without_poles
from relu2ir.ir.primitives import PRIMITIVES

# What the gradient formulas of a spec file call the arriving gradient and the op's own result.
GRAD, RESULT = "grad", "y"


class Layout(str, Enum):
    """How the scalar names of an input lie in its tensor.

    ``plain``: one name, the element itself. ``halves``: two names, ``x.chunk(2, -1)``. ``pairs``: two names,
    ``x[..., 0::2]`` and ``x[..., 1::2]``. ``vector``: one name, one element per column, the same in every row.
    ``scalar``: one name, the tensor's only element.
    """

    plain = "plain"
    halves = "halves"
    pairs = "pairs"
    vector = "vector"
    scalar = "scalar"

    @property
    def packed(self) -> bool:
        """Whether the tensor holds two parts side by side."""
        return self in (Layout.halves, Layout.pairs)

    @property
    def broadcast(self) -> bool:
        """Whether the tensor is read again and again: its shape is not the op's."""
        return self in (Layout.vector, Layout.scalar)


@dataclass(frozen=True)
class Input:
    """A tensor argument: ``parts`` are the scalar names that it provides (the name itself when plain)."""

    name: str
    layout: Layout = Layout.plain
    parts: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.layout.packed:
            return f"{self.name}: {self.layout.value}[{', '.join(self.parts)}]"
        return f"{self.name}: {self.layout.value}" if self.layout.broadcast else self.name


@dataclass(frozen=True)
class Output:
    """A result tensor: one expression per part of its layout; its strides are those of the input numbered ``like``."""

    name: str
    layout: Layout
    exprs: tuple[Expr, ...]
    like: int = 0


@dataclass(frozen=True)
class OpSpec:
    """One op, verified. Two specs are equal when they mean the same and are called the same.

    ``grad`` and ``grad_from_output`` are the gradients that the file declares, by scalar name; what it does not declare
    is derived. ``save`` is what a backward keeps unless asked otherwise: ``input`` or ``output``. ``forward`` is the op
    from which this one is derived: as its gradient (``gradient_outputs``: which output holds that of each input) or
    ``in_place``.
    """

    namespace: str
    name: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    params: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    doc: str = ""
    source: str = ""
    tolerance: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    grad: Mapping[str, Expr] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    grad_from_output: Mapping[str, Expr] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    save: str = "input"
    forward: OpSpec | None = field(default=None, repr=False)
    gradient_outputs: tuple[int, ...] = ()
    writes_input: bool = False
    file: str = field(default="", compare=False)

    def __getstate__(self) -> dict[str, Any]:
        # Read-only views can be neither copied nor pickled; graphs that hold a spec are both.
        state = {each.name: getattr(self, each.name) for each in fields(self)}
        return state | {name: dict(state[name]) for name in _VIEWS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        views = {name: MappingProxyType(state[name]) for name in _VIEWS}
        self.__dict__.update(state | views)

    @property
    def qualname(self) -> str:
        """``relu2ir::relu_squared``, the name of the public op in torch."""
        return f"{self.namespace}::{self.name}"

    @property
    def exprs(self) -> tuple[Expr, ...]:
        """Every output expression, in the order in which kernels store them."""
        return tuple(expr for output in self.outputs for expr in output.exprs)

    @property
    def expr(self) -> Expr:
        """The expression of a forward op, which has one plain output."""
        return self.exprs[0]

    @property
    def parts(self) -> tuple[str, ...]:
        """Every scalar input name, in the order in which kernels load them."""
        return tuple(part for input in self.inputs for part in input.parts)

    @property
    def arguments(self) -> str:
        """The torch schema's argument list: ``Tensor x, *, float limit=7.0``."""
        kind = "Tensor(a!)" if self.writes_input else "Tensor"
        tensors = [f"{kind} {input.name}" for input in self.inputs]
        params = [f"float {name}={value!r}" for name, value in self.params.items()]
        return ", ".join(tensors + (["*", *params] if params else []))

    @property
    def returns(self) -> str:
        if self.writes_input:
            return "Tensor(a!)"
        return "Tensor" if len(self.outputs) == 1 else f"({', '.join(['Tensor'] * len(self.outputs))})"

    @property
    def schema(self) -> str:
        """``relu_squared(Tensor x) -> Tensor``."""
        return f"{self.name}({self.arguments}) -> {self.returns}"

    @property
    def kernel_schema(self) -> str:
        """The schema of a provider's kernel: no keywords, no defaults; one that writes its input returns nothing."""
        tensors = [f"{'Tensor(a!)' if self.writes_input else 'Tensor'} {input.name}" for input in self.inputs]
        arguments = ", ".join([*tensors, *(f"float {name}" for name in self.params)])
        return f"{self.name}.kernel({arguments}) -> {'()' if self.writes_input else self.returns}"

    @property
    def formula(self) -> str:
        """``relu_squared(x) = square(relu(x))``, over scalars."""
        return f"{self.name}({', '.join([*self.parts, *self.params])}) = {', '.join(map(str, self.exprs))}"

    @cached_property
    def definition(self) -> str:
        """The canonical text of what the op computes: inputs, params and expression, nothing else.

        A derived op is defined by its forward op and what it is of that: its own text may be long.
        """
        if self.forward is not None:
            return f"{'in place' if self.writes_input else 'gradient of'} {self.forward.definition}"
        inputs = ", ".join(map(str, self.inputs))
        params = ", ".join(f"{name}={format_number(value)}" for name, value in self.params.items())
        declared = {"grad": self.grad, "grad_from_output": self.grad_from_output}
        also = [f"; {key} {name} = {expr}" for key, exprs in declared.items() for name, expr in exprs.items()]
        return f"({inputs}{'; ' if params else ''}{params}) -> {self.expr}{''.join(also)}"

    @cached_property
    def hash(self) -> str:
        """16 hex digits of `definition`: a kernel built from another one is rejected, and compile caches hold it."""
        return hashlib.sha256(self.definition.encode()).hexdigest()[:16]

    @cached_property
    def differentiable(self) -> OpSpec:
        """This gradient op for plain PyTorch to differentiate: `without_poles`."""
        return replace(self, outputs=tuple(replace(out, exprs=without_poles(out.exprs)) for out in self.outputs))

    @cached_property
    def exact(self) -> bool:
        """Whether fusing changes no bit: no value is rounded before the last operation rounds it.

        True when every operation is correctly rounded and reads only values that are exact in any type: elements,
        results of relu, neg, where and their like, numbers of few digits. A param may have any digits.
        """
        nodes = postorder(self.exprs)
        read = {arg for node in nodes for arg in node.args}  # an output may be read by another one
        return all(
            PRIMITIVES[node.primitive].correctly_rounded and not (node in read and PRIMITIVES[node.primitive].rounds)
            if isinstance(node, Call)
            else node.name not in self.params
            if isinstance(node, Name)
            else _is_short(node)
            for node in nodes
        )

    @cached_property
    def backward(self) -> OpSpec:
        """The gradient op: the arriving gradient and the inputs in, and out one tensor laid out like each input.

        The gradient of a broadcast input comes out with the op's own shape, to be summed; where another output holds
        the same values (x and bias of x + bias), that one serves both: see `gradient_outputs`.
        """
        derived = dict(zip(self.parts, gradient([(self.expr, Name(GRAD))], self.parts)))
        return self._gradient_op("backward", self.inputs, {**derived, **self.grad})

    @cached_property
    def backward_from_output(self) -> OpSpec | None:
        """The gradient op that reads the result in place of the inputs; None unless one is declared."""
        if not self.grad_from_output:
            return None
        return self._gradient_op("backward_from_output", (Input(RESULT, parts=(RESULT,)),), self.grad_from_output)

    def _gradient_op(self, what: str, reads: tuple[Input, ...], exprs: Mapping[str, Expr]) -> OpSpec:
        assert self.forward is None, "from the second derivative on, plain PyTorch runs"
        inputs = (Input(GRAD, parts=(GRAD,)), *reads)
        of_inputs = self._gradients(inputs, exprs)
        outputs = tuple(dict.fromkeys(of_inputs))
        return OpSpec(
            namespace=self.namespace,
            name=f"{self.name}_{what}",
            inputs=inputs,
            outputs=outputs,
            params=self.params,
            doc=f"The gradient of {self.name}{', from its result' if reads is not self.inputs else ''}.",
            tolerance=self.tolerance,
            forward=self,
            gradient_outputs=tuple(map(outputs.index, of_inputs)),
            file=self.file,
        )

    def _gradients(self, reads: tuple[Input, ...], exprs: Mapping[str, Expr]) -> list[Output]:
        """For each input the output of a gradient op, one that ``reads`` these, that holds its gradient."""
        places = {input.name: at for at, input in enumerate(reads) if not input.layout.broadcast}
        found: list[Output] = []
        for input in self.inputs:
            values = tuple(exprs[part] for part in input.parts)
            layout = Layout.plain if input.layout.broadcast else input.layout
            same = [output for output in found if (output.layout, output.exprs) == (layout, values)]
            like = places.get(input.name, places.get(RESULT, 0) if input is self.inputs[0] else 0)
            shared = same and input.layout.broadcast
            found.append(same[0] if shared else Output(input.name, layout, values, like))
        return found

    @property
    def with_gradients(self) -> tuple[OpSpec, ...]:
        """This op and its gradient ops: what kernels are made of."""
        of_output = self.backward_from_output
        return (self, self.backward, *([of_output] if of_output is not None else []))

    @cached_property
    def in_place(self) -> OpSpec | None:
        """``relu_squared_``, which writes the result into its input; None where the gradient needs what was there."""
        if not self.grad_from_output or len(self.inputs) > 1:
            return None
        return replace(self, name=f"{self.name}_", save="output", forward=self, writes_input=True)


_VIEWS = ("params", "tolerance", "grad", "grad_from_output")


def _is_short(constant: Expr) -> bool:
    """Whether a number is exact in every type: bfloat16 holds 8 bits, float16 ends at 65504 and begins at 2**-24."""
    value = abs(constant.value) if isinstance(constant, Const) else math.nan
    return value == 0 or (2.0**-16 <= value < 2.0**16 and (value / 2.0 ** (math.frexp(value)[1] - 8)).is_integer())
