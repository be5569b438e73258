"""Where a graph computes an op: the op's expression unified with what the nodes say, read through `spellings`.

Nothing here changes a graph, and nothing here knows a provider. Whether a match may be rewritten is `check.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from relu2ir.fx.between import BETWEEN, between
from relu2ir.fx.forms import forms_of, names_of
from relu2ir.fx.packing import cast_of, part_of, value_of
from relu2ir.fx.patterns import Flaw, Pattern
from relu2ir.fx.reading import Operand, Spelled, spelled
from relu2ir.fx.shapes import are_declared, widens_nothing
from relu2ir.fx.spellings import is_number
from relu2ir.ir.expr import Call, Const, Expr, Name
from relu2ir.spec import OpSpec


@dataclass(frozen=True)
class Match:
    """An op found at ``root``.

    ``covered`` are the nodes that compute it, root first; ``packing`` the views that split a packed input; ``reads``
    the covered nodes that read an input. ``other_square``: the op has a square where this place has a product, or the
    reverse; under CUDA autocast their types differ (``r * r`` stays bfloat16, ``square`` gives float32).
    ``floating``: op and place agree on floating operands only (``relu(x) ** 2.0`` makes floats of integers).
    ``forward_only``: the values agree, the gradients do not everywhere. ``casts``: a half type is computed in float32
    and rounded on the way; ``unrounded``: more than one step of the op is, with no rounding between.
    """

    pattern: Pattern
    root: Node
    inputs: Mapping[str, Node] = field(default_factory=dict)
    params: Mapping[str, float] = field(default_factory=dict)
    covered: Mapping[Node, Spelled] = field(default_factory=dict)
    names: Mapping[Operand, str] = field(default_factory=dict)
    packing: tuple[Node, ...] = ()
    reads: tuple[Node, ...] = ()
    other_square: bool = False
    floating: bool = False
    forward_only: bool = False
    casts: bool = False
    unrounded: bool = False
    flaw: Flaw | None = None

    @property
    def spec(self) -> OpSpec:
        return self.pattern.spec

    @property
    def tensors(self) -> tuple[Node, ...]:
        """The op's tensors in order."""
        return tuple(self.inputs[input.name] for input in self.spec.inputs)

    @property
    def spelling(self) -> str:
        """The place as its author wrote it: ``torch.square(F.relu(x))``."""

        def text(operand: Any) -> str:
            if operand in self.covered:
                return self.covered[operand].text([text(o) for o in self.covered[operand].operands])
            return self.names.get(operand, str(operand)) if isinstance(operand, Node) else repr(operand)

        return text(self.root)


def _is_wider(value: Operand, root: Node) -> bool:
    """Whether ``value`` is float32 where the result is of a half type."""
    if not isinstance(value, Node):
        return False
    halves = (torch.float16, torch.bfloat16)
    wide = getattr(value_of(value), "dtype", None) is torch.float32
    return wide and getattr(value_of(root), "dtype", None) in halves


_COMMUTE = frozenset({"add", "mul", "maximum", "minimum"})


class Matcher:
    """Matches in one graph over ``root``."""

    def __init__(self, graph: Graph, root: nn.Module) -> None:
        self.root = root
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        read = ((node, spelled(node, root)) for node in graph.nodes)
        self.spelled: dict[Node, Spelled] = {node: primitive for node, primitive in read if primitive is not None}
        self.by_primitive: dict[str, list[Node]] = {}
        self.casts = {node: source for node in graph.nodes if (source := cast_of(node)) is not None}
        stand = ((node, between(node, root)) for node in graph.nodes if node not in self.casts)
        self.between: dict[Node, tuple[str, Node]] = {node: found for node, found in stand if found is not None}
        for node in [*self.casts, *self.spelled]:  # a cast first: one at the end belongs to the op
            primitive = self.spelled.get(self.casts.get(node, node))
            if primitive is not None:
                self.by_primitive.setdefault(primitive.primitive, []).append(node)

    def find(
        self, patterns: Sequence[Pattern], check: Callable[[Match], Flaw | None]
    ) -> tuple[list[Match], list[Match]]:
        """The matches in which ``check`` finds no flaw, and the near misses in which it does, each in graph order.

        No node belongs to two matches; longer patterns choose first.
        """
        found: dict[Node, Match] = {}
        missed: dict[Node, Match] = {}
        claimed: set[Node] = set()
        for pattern in patterns:
            for node in self._candidates(pattern.expr):
                if node in claimed:
                    continue
                for match in self._matches(pattern, node):
                    if not claimed.isdisjoint(match.covered) or not are_declared(match.spec, match.tensors, self.root):
                        continue
                    flaw = pattern.flaw or match.flaw or check(match)
                    if flaw is None:
                        found[node] = match
                        claimed.update(match.covered)
                        break
                    missed.setdefault(node, replace(match, flaw=flaw))
        near = [match for node, match in missed.items() if claimed.isdisjoint(match.covered)]
        order = self.position.__getitem__
        return sorted(found.values(), key=lambda m: order(m.root)), sorted(near, key=lambda m: order(m.root))

    def _candidates(self, expr: Expr) -> list[Node]:
        assert isinstance(expr, Call)
        return [node for name in names_of(expr) for node in self.by_primitive.get(name, [])]

    def _matches(self, pattern: Pattern, root: Node) -> Iterator[Match]:
        yield from self._unify(pattern.expr, root, root, Match(pattern, root))

    def _unify(self, expr: Expr, value: Operand, reader: Node, match: Match) -> Iterator[Match]:
        """Every way to read ``value``, an operand of ``reader``, as ``expr``, each as ``match`` grown by it."""
        if expr in match.pattern.steps and reader not in self.casts and _is_wider(value, match.root):
            match = replace(match, unrounded=True)
        if isinstance(expr, Name):
            yield from self._bind(expr.name, value, reader, match)
            if value in self.casts:
                yield from self._bind(expr.name, self.casts[value], value, self._cover_cast(value, match))
        elif value in self.casts:
            yield from self._unify(expr, self.casts[value], value, self._cover_cast(value, match))
        elif isinstance(expr, Const):
            yield from self._unify_number(expr, value, reader, match)
        elif is_number(value) and isinstance(expr, Call) and expr.primitive == "neg":
            yield from self._unify(expr.args[0], -value, reader, match)  # -limit, where the graph has -7.0
        elif isinstance(value, Node) and value in self.spelled:
            yield from self._unify_call(expr, value, self.spelled[value], match)
        elif isinstance(value, Node) and value in self.between:
            code, source = self.between[value]
            yield from self._unify(expr, source, value, self._cover_between(value, code, source, match))

    def _unify_call(self, expr: Expr, value: Node, primitive: Spelled, match: Match) -> Iterator[Match]:
        """``value``, a call of ``primitive``, as ``expr`` in each of its forms."""
        assert isinstance(expr, Call)
        if expr.primitive == "square":
            written = "mul" if primitive.primitive == "mul" else "square"
            match = replace(match, other_square=match.other_square or match.pattern.squares != {written})
        if primitive.primitive == expr.primitive:
            grown = self._cover(value, primitive, match)
            a, *rest = primitive.operands
            yield from self._unify_all(expr.args, primitive.operands, value, grown)
            if primitive.primitive in _COMMUTE and a is not rest[0]:
                yield from self._unify_all(expr.args, (rest[0], a), value, grown)
        for form, forward_only in forms_of(expr):
            if primitive.primitive in names_of(form):
                grown = replace(match, forward_only=match.forward_only or forward_only)
                yield from self._unify_call(form, value, primitive, grown)

    def _unify_number(self, expr: Const, value: Operand, reader: Node, match: Match) -> Iterator[Match]:
        if is_number(value):
            if Const(float(value)) is expr:
                # An op reads its own 1.0 as 1; only a graph's 1.0 makes floats of integers.
                yield replace(match, floating=match.floating or (isinstance(value, float) and value.is_integer()))
        elif isinstance(value, Node) and reader in self.spelled and self.spelled[reader].primitive == "pow":
            detail = f"pow with a tensor exponent differs in the last bit: write the number {expr}"
            if isinstance(value_of(value), torch.SymInt | torch.SymFloat):
                detail = f"the exponent is symbolic, it may be another number than {expr}: write the number"
            yield replace(match, flaw=match.flaw or Flaw("tensor_exponent", detail))
        elif isinstance(value, Node) and value in self.spelled and widens_nothing(value, reader):
            made = self.spelled[value]
            if made.primitive == "const" and is_number(made.operands[0]) and made.operands[0] == expr.value:
                yield self._cover(value, made, match)

    def _unify_all(
        self, exprs: Sequence[Expr], values: Sequence[Operand], reader: Node, match: Match
    ) -> Iterator[Match]:
        if not exprs:
            yield match
            return
        for grown in self._unify(exprs[0], values[0], reader, match):
            yield from self._unify_all(exprs[1:], values[1:], reader, grown)

    def _cover(self, node: Node, primitive: Spelled, match: Match) -> Match:
        flaw = match.flaw
        if primitive.altered:
            detail = f"the module '{node.target}' has hooks or a forward of its own, which would not run: remove them"
            flaw = flaw or Flaw("hooked", detail)
        return replace(match, covered={**match.covered, node: primitive}, flaw=flaw)

    def _cover_cast(self, node: Node, match: Match) -> Match:
        text = f"{{0}}.to({str(value_of(node).dtype).removeprefix('torch.')})"
        cast = Spelled("cast", (self.casts[node],), text)
        return replace(match, covered={**match.covered, node: cast}, casts=True)

    def _cover_between(self, node: Node, code: str, source: Node, match: Match) -> Match:
        flaw = match.flaw or (Flaw(code, f"at '{node.name}' {BETWEEN[code].detail}") if code else None)
        passed = Spelled("between", (source,), f"{node.name}({{0}})")
        return replace(match, covered={**match.covered, node: passed}, flaw=flaw)

    def _bind(self, name: str, value: Operand, reader: Node, match: Match) -> Iterator[Match]:
        if name in match.spec.params:
            if is_number(value) and Const(match.params.get(name, value)) is Const(value):  # 0.0 is not -0.0
                params = {**match.params, name: float(value)}
                yield replace(match, params=params, floating=match.floating or isinstance(value, int))
            return
        input, index = match.pattern.parts[name]
        if not isinstance(value, Node):
            return
        source, packing = value, ()
        if input.layout.packed:
            part = part_of(value)
            if part is None or (part.layout, part.index) != (input.layout, index):
                return
            source, packing = part.source, part.views
        # One tensor for two inputs, as in x * relu(x), is another function than the op's.
        others = [tensor for name, tensor in match.inputs.items() if name != input.name]
        if match.inputs.get(input.name, source) is source and source not in others:
            yield replace(
                match,
                inputs={**match.inputs, input.name: source},
                names={**match.names, value: name},
                packing=tuple(dict.fromkeys((*match.packing, *packing))),
                reads=tuple(dict.fromkeys((*match.reads, reader))),
            )
