"""What the pass looks for: each op's expression in one canonical form, and what is often mistaken for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from relu2ir.fx.forms import canonical, forms_of, largest
from relu2ir.ir.expr import Call, Const, Expr, Name, fold, postorder, substitute
from relu2ir.ir.parse import parse
from relu2ir.spec import Input, OpSpec


@dataclass(frozen=True)
class Flaw:
    """Why a place that looks like an op is not rewritten: a stable code, and what to do about it."""

    code: str
    detail: str


# What people write for square(relu(x)) and what differs from it.
LOOKALIKES = (
    (
        parse("x * relu(x)"),
        Flaw("x_times_relu", "x * relu(x) is NaN at -inf, square(relu(x)) is 0: write torch.square(F.relu(x))"),
    ),
    (
        parse("where(x > 0, square(x), 0)"),
        Flaw("where_form", "this where drops NaN, relu keeps it: write torch.square(F.relu(x))"),
    ),
    (
        Call("float_power", (Call("relu", (Name("x"),)), Const(2))),
        Flaw("float_power", "float_power computes and returns float64: write torch.square(F.relu(x))"),
    ),
)


@dataclass(frozen=True)
class Pattern:
    """An op's expression in canonical form; with a ``flaw``, an expression that is often mistaken for it."""

    spec: OpSpec
    expr: Expr
    flaw: Flaw | None = None

    @cached_property
    def size(self) -> int:
        """How many nodes it may stand for."""
        return largest(self.expr)

    @property
    def is_of_declaration(self) -> bool:
        """Whether it is the op's own expression, neither a lookalike nor another form of a single primitive."""
        return self.expr is canonical(self.spec.expr)

    @cached_property
    def steps(self) -> frozenset[Expr]:
        """The op's own calls below its root: what plain PyTorch rounds, one by one."""
        return frozenset(node for node in postorder([self.expr]) if isinstance(node, Call)) - {self.expr}

    @cached_property
    def squares(self) -> set[str]:
        """How the op's own expression writes its squares: ``square``, ``mul``, or both."""
        calls = [node for node in postorder([self.spec.expr]) if isinstance(node, Call)]
        return {
            c.primitive for c in calls if c.primitive == "square" or (c.primitive == "mul" and c.args[0] is c.args[1])
        }

    @cached_property
    def parts(self) -> Mapping[str, tuple[Input, int]]:
        """Each scalar input name with its tensor and its index among that tensor's parts."""
        return {part: (input, i) for input in self.spec.inputs for i, part in enumerate(input.parts)}


def patterns(specs: Iterable[OpSpec], exact: bool = False) -> list[Pattern]:
    """What to look for, the longest first. An op of a single primitive is raised where it is written out only."""
    found = []
    for spec in specs:
        expr = canonical(spec.expr)
        if exact and not spec.exact:
            continue
        if isinstance(expr, Call) and any(isinstance(arg, Call) for arg in expr.args):
            found.append(Pattern(spec, expr))
            found.extend(Pattern(spec, other, flaw) for other, flaw in _lookalikes(expr))
        else:
            found.extend(Pattern(spec, form) for form, _ in forms_of(expr))
    return sorted(found, key=lambda p: (p.flaw is not None, -p.size, len(p.spec.inputs), p.spec.qualname))


def _lookalikes(expr: Expr) -> Iterator[tuple[Expr, Flaw]]:
    for lookalike, flaw in LOOKALIKES:

        def visit(node: Expr, args: list[Expr], lookalike: Expr = lookalike) -> Expr:
            if not isinstance(node, Call):
                return node
            inner = node.args[0]
            if node.primitive == "square" and isinstance(inner, Call) and inner.primitive == "relu":
                return substitute(lookalike, {"x": inner.args[0]})
            return Call(node.primitive, tuple(args))

        other = fold([expr], visit)[expr]
        if other is not expr:
            yield other, flaw
