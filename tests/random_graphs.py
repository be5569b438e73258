"""Random programs around the ops: every way to write their primitives, and what must keep the pass from rewriting one.

A `Program` is text over named values, so a failure prints as the Python that shows it. Most of it spells an op of the
library out, and with some chance something comes between: a write, a view, a use of an intermediate result, another
mode, a cast, or a spelling that only looks right.
"""

from __future__ import annotations

import itertools
import linecache
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import random_spellings as texts
import torch
import torch.nn.functional as F
from hypothesis import reject
from hypothesis import strategies as st
from program_surroundings import ROWS, Surroundings
from torch import nn

from relu2ir import binaries, specfile
from relu2ir.ir.expr import Call, Const, Expr, Name
from relu2ir.layout import Layout
from relu2ir.spec import OpSpec

T = TypeVar("T")
SPECIAL = (float("nan"), float("inf"), -float("inf"), -0.0, 1e-40, 60000.0, -60000.0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)


@dataclass(frozen=True)
class Program:
    """A forward over ``x`` and ``y`` of [4, width], a vector ``bias``, a 0-d ``scale`` and a number ``n``."""

    lines: tuple[str, ...]
    returned: tuple[str, ...]
    width: int = 8
    dtype: torch.dtype = torch.float32
    other: torch.dtype | None = None
    grad: bool = False
    training: bool = False
    strided: bool = False
    aliased: bool = False
    special: bool = False

    @property
    def text(self) -> str:
        body = "\n".join(f"    {line}" for line in (*self.lines, f"return ({', '.join(self.returned)},)"))
        return f"def forward(self, x, y, bias, scale, n):\n{body}\n"

    @property
    def wide(self) -> Program:
        """The same program in float64."""
        lines = tuple(line.replace(".float()", ".double()") for line in self.lines)
        return replace(self, lines=lines, dtype=torch.float64, other=None)

    def module(self) -> nn.Module:
        file = f"<random program {next(_numbers)}>"
        linecache.cache[file] = (len(self.text), None, self.text.splitlines(keepends=True), file)
        scope = {"torch": torch, "F": F, "aten": torch.ops.aten, "operator": operator, "low": self.dtype}
        scope["full"] = torch.float64 if self.dtype == torch.float64 else torch.float32
        exec(compile(self.text, file, "exec"), scope)
        kind = type("RandomProgram", (Surroundings,), {"forward": scope["forward"]})
        return kind(self.width, self.dtype, self.training, self.grad and self.dtype.is_floating_point)

    def inputs(self) -> tuple[list[Any], list[torch.Tensor]]:
        """New inputs, the same at every call, and the leaves whose gradients can be asked for."""
        random, leaves = torch.Generator().manual_seed(1), []

        def tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            value = torch.randn(list(shape), generator=random, dtype=torch.float64) * 2
            if self.special and value.numel() > len(SPECIAL):
                value.view(-1)[1 : len(SPECIAL) + 1] = torch.tensor(SPECIAL, dtype=torch.float64)
            value = value.nan_to_num(0, 9, -9).round().to(dtype) if dtype == torch.int64 else value.to(dtype)
            if not (self.grad and dtype.is_floating_point):
                return value
            leaves.append(value.requires_grad_())
            return value.clone()  # no leaf, so that it may be written to

        x = tensor((self.width, ROWS), self.dtype).t() if self.strided else tensor((ROWS, self.width), self.dtype)
        y = tensor((ROWS, 2 * self.width), self.other or self.dtype)[:, ::2]
        bias, scale = tensor((self.width,), self.dtype), tensor((), self.dtype)
        return [x, x.view(x.shape) if self.aliased else y, bias, scale, 3], leaves


_numbers = itertools.count()


class _Writer:
    """Draws one program, line by line. Values are known with their shapes, so that most programs can run."""

    def __init__(self, integer: Callable[[int, int], int], statements: bool, typed: bool, disturbed: int) -> None:
        self.integer, self.statements, self.disturbed = integer, statements, disturbed
        self.width = 3 if typed and self.chance(6) else 8
        whole = (ROWS, self.width)
        self.shapes = {"x": whole, "y": whole, "self.state": whole, "self.gain": whole}
        self.lines: list[str] = []
        self.depth = 0
        self.results: list[str] = []

    def chance(self, percent: int) -> bool:
        return self.integer(0, 99) >= 100 - percent  # shrinks to False

    def one_of(self, values: Sequence[T]) -> T:
        return values[self.integer(0, len(values) - 1)]

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def value(self, text: str, shape: tuple[int, ...]) -> str:
        name = f"v{len(self.lines)}"
        self.line(f"{name} = {text}")
        self.shapes[name] = shape
        return name

    def any_value(self, shape: tuple[int, ...] | None = None) -> str:
        names = [name for name, of in self.shapes.items() if shape in (None, of)]
        return self.one_of(names[-6:] if self.chance(60) else names)

    def spelled(self, primitive: str, operands: list[str]) -> str:
        right, in_place, wrong = texts.SPELLINGS[primitive]
        if not _is_value(operands[0]):  # a number on the left
            return right[0].format(*operands)
        table = wrong if self.chance(4) else in_place if in_place and self.chance(7) else right
        return self.one_of(table).format(*operands)

    def op(self, spec: OpSpec) -> None:
        """The op spelled out over values of the program, now and then with something in between."""
        names: dict[str, str] = {name: repr(self.number(value)) for name, value in spec.params.items()}
        shape = None
        for input in spec.inputs:
            if input.layout.packed:
                names |= dict(zip(input.parts, self.parts(input.layout)))
            elif input.layout == Layout.plain:
                names[input.name] = self.any_value(shape)
            else:
                names[input.name] = "bias" if input.layout == Layout.vector else "scale"
                if self.chance(15):
                    names[input.name] = self.any_value(shape)
            shape = self.shapes[names[input.parts[0]]] if shape is None else shape
        if self.chance(10):
            names = {name: self.cast(value) if value in self.shapes else value for name, value in names.items()}
        self.results.append(self.expression(spec.expr, names, {}))
        if self.chance(10):
            self.results.append(self.cast(self.results[-1]))

    def number(self, value: float) -> float:
        return self.one_of([value, value, 2.0, 1]) if self.chance(30) else value

    def expression(self, expr: Expr, names: dict[str, str], known: dict[Expr, str]) -> str:
        if isinstance(expr, Const):
            return repr(int(expr.value) if expr.value.is_integer() and not self.chance(15) else expr.value)
        if isinstance(expr, Name):
            return names[expr.name]
        if expr in known and not self.chance(30):
            return known[expr]
        assert isinstance(expr, Call)
        operands = [self.expression(arg, names, known) for arg in expr.args]
        if not any(map(_is_value, operands)):
            return f"-{operands[0]}" if expr.primitive == "neg" else operands[0]
        if expr.primitive in ("add", "mul") and self.chance(25):
            operands.reverse()
        self.disturb(operands)
        shapes = [self.shapes.get(name, (self.width,) if name == "bias" else ()) for name in operands]
        known[expr] = self.value(self.spelled(expr.primitive, operands), _broadcast(shapes))
        return known[expr]

    def disturb(self, operands: Sequence[str]) -> None:
        """Something between two steps of an op, of which ``operands`` are read next."""
        if not self.chance(self.disturbed):
            return
        near = [name for name in operands if name in self.shapes] or ["x"]
        name = self.one_of(near) if self.chance(50) else self.any_value()
        what = self.integer(0, 5)
        if what == 0:
            self.results.append(name)
        elif what == 1:
            self.value(self.one_of(texts.VIEWS).format(name), self.shapes[name])
        elif what == 2 and self.statements:
            self.mode()
        elif what == 3:
            self.results.append(self.value(f"{name} + 1", self.shapes[name]))
        else:
            self.write(name)

    def write(self, name: str) -> None:
        table = texts.ITEM_WRITES if self.statements and self.chance(20) else texts.WRITES
        self.line(self.one_of(table).format(name))

    def mode(self) -> None:
        if self.depth:
            self.depth = 0
        else:
            self.line(f"with {self.one_of(texts.MODES)}:")
            self.depth = 1
            self.line("pass")

    def cast(self, name: str) -> str:
        return self.value(self.one_of(texts.CASTS).format(name), self.shapes[name])

    def parts(self, layout: Layout) -> tuple[str, str]:
        source = self.any_value((ROWS, self.width))
        own, others = (texts.HALVES, texts.PAIRS) if layout == Layout.halves else (texts.PAIRS, texts.HALVES)
        table = texts.OTHER_PARTS if self.width == 8 and self.chance(12) else others if self.chance(4) else own
        half, template = (self.width + 1) // 2, self.one_of(table)
        sizes, whole = (half, self.width - half), torch.empty(ROWS, self.width, device="meta")
        taken = eval(template.format("source", *sizes), {"torch": torch, "source": whole})
        names = f"v{len(self.lines)}", f"u{len(self.lines)}"
        self.line(f"{', '.join(names)} = {template.format(source, *sizes)}")
        self.shapes |= {name: tuple(part.shape) for name, part in zip(names, taken)}
        return names

    def step(self) -> None:
        """A line that belongs to no op."""
        name, what = self.any_value(), self.integer(0, 9)
        shape = self.shapes[name]
        if what < 3:
            self.value(self.one_of(texts.COPIES).format(name), shape)
        elif what == 3:
            self.value(self.one_of(texts.VIEWS).format(name), shape)
        elif what == 4:
            self.value(f"{name} * {self.any_value(shape)}", shape)
        elif what == 5 and shape[-1:] == (self.width,):
            self.value(f"self.linear({name})", shape)
        elif what == 6:
            self.value(self.one_of(["{0} * n", "n * {0}", "{0} + n"]).format(name), shape)
        elif what == 7 and self.statements:
            self.mode()
        elif what == 8 and self.chance(40):
            self.write(name)
        else:
            self.value(self.spelled(self.one_of(["relu", "sigmoid", "silu"]), [name]), shape)


def _is_value(text: str) -> bool:
    """Whether ``text`` names a tensor rather than writing a number."""
    return text[0].isalpha()


class Impossible(Exception):
    """What was drawn is no program: its shapes do not fit."""


def _broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        raise Impossible from None


def drawn(integer: Callable[[int, int], int], statements: bool, typed: bool, disturbed: int = 9) -> Program:
    """A program around one to three ops, by ``integer(low, high)``, a random number of that range.

    ``disturbed`` percent of the steps of an op have something in front of them. With ``statements`` also what only a
    compiler's capture can hold. Where a capture is not ``typed``, no width is odd: of 3, the parts of 2 and 1 multiply,
    which no op can. Raises Impossible.
    """
    writer = _Writer(integer, statements, typed, disturbed)
    for _ in range(1 + writer.chance(50) + writer.chance(30)):
        while writer.chance(40):
            writer.step()
        writer.op(writer.one_of(_FOUND))
    while writer.chance(30):
        writer.step()
    others = [writer.any_value() for _ in range(writer.chance(15))]
    return Program(
        tuple(writer.lines),
        tuple(dict.fromkeys([*writer.results, *others])),
        width=writer.width,
        dtype=writer.one_of(DTYPES) if writer.chance(60) else torch.float32,
        other=writer.one_of(DTYPES) if writer.chance(10) else None,
        grad=writer.chance(40),
        training=writer.chance(50),
        strided=writer.chance(30),
        aliased=writer.chance(15),
        special=writer.chance(40),
    )


@st.composite
def programs(draw: Callable[..., Any], statements: bool, typed: bool) -> Program:
    """`drawn`, for hypothesis."""
    try:
        return drawn(lambda low, high: draw(st.integers(low, high)), statements, typed)
    except Impossible:
        return reject()


# Of a single primitive nothing is fused, and where situ's params choose no graph shows.
_FOUND = [
    spec
    for spec in specfile.read(binaries.shipped("ops.yaml")).ops  # other tests load other ops
    if isinstance(spec.expr, Call) and spec.name not in ("silu", "gelu", "gelu_tanh", "softplus", "situ_and_mul")
]
