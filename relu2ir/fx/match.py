"""Where a graph computes an op: the op's expression unified with what the nodes say, read through `spellings`.

Nothing here changes a graph, and nothing here knows a provider.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from relu2ir.fx.alias import Aliases
from relu2ir.fx.packing import part_of, value_of
from relu2ir.fx.patterns import Flaw, Pattern, power_of
from relu2ir.fx.spellings import Operand, Spelled, is_number, spelled
from relu2ir.ir.expr import Call, Const, Expr, Name
from relu2ir.layout import is_broadcast_to, logical_shape
from relu2ir.spec import OpSpec

_NO_GAIN = "it must be computed anyway, so fusing would save nothing"


@dataclass(frozen=True)
class Match:
    """An op found at ``root``.

    ``covered`` are the nodes that compute it, root first; ``packing`` the views that split a packed input; ``reads``
    the covered nodes that read an input. ``other_square``: the op has a square where this place has a product, or the
    reverse; under CUDA autocast their types differ (``r * r`` stays bfloat16, ``square`` gives float32).
    ``floating``: op and place agree on floating operands only (``relu(x) ** 2.0`` makes floats of integers).
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


class Matcher:
    """Matches in one graph over ``root``. ``autocast``: it runs, in whole or in part, under autocast."""

    def __init__(self, graph: Graph, root: nn.Module, autocast: bool = False) -> None:
        self.graph, self.root, self.autocast = graph, root, autocast
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        read = ((node, spelled(node, root)) for node in graph.nodes)
        self.switches = [(at, node) for node, at in self.position.items() if _switches_mode(node)]
        self.spelled: dict[Node, Spelled] = {node: primitive for node, primitive in read if primitive is not None}
        self.by_primitive: dict[str, list[Node]] = {}
        for node, primitive in self.spelled.items():
            self.by_primitive.setdefault(primitive.primitive, []).append(node)

    @cached_property
    def aliases(self) -> Aliases:
        return Aliases(self.graph, self.root)

    def find(self, patterns: Sequence[Pattern]) -> tuple[list[Match], list[Match]]:
        """The matches, and the near misses (matches with a flaw), each in graph order.

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
                    if not claimed.isdisjoint(match.covered) or not _broadcasts(match):
                        continue
                    flaw = pattern.flaw or match.flaw or self._flaw(match)
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
        names = dict.fromkeys((expr.primitive, *(("mul", "pow") if power_of(expr) else ())))
        return [node for name in names for node in self.by_primitive.get(name, [])]

    def _matches(self, pattern: Pattern, root: Node) -> Iterator[Match]:
        yield from self._unify(pattern.expr, root, root, Match(pattern, root))

    def _unify(self, expr: Expr, value: Operand, reader: Node, match: Match) -> Iterator[Match]:
        """Every way to read ``value``, an operand of ``reader``, as ``expr``, each as ``match`` grown by it."""
        if isinstance(expr, Name):
            yield from self._bind(expr.name, value, reader, match)
        elif isinstance(expr, Const):
            if is_number(value) and Const(float(value)) is expr:
                # An op reads its own 1.0 as 1; only a graph's 1.0 makes floats of integers.
                yield replace(match, floating=match.floating or (isinstance(value, float) and value.is_integer()))
        elif is_number(value) and isinstance(expr, Call) and expr.primitive == "neg":
            yield from self._unify(expr.args[0], -value, reader, match)  # -limit, where the graph has -7.0
        elif isinstance(value, Node) and (primitive := self.spelled.get(value)) is not None:
            assert isinstance(expr, Call)
            grown = self._cover(value, primitive, match)
            a, *rest = primitive.operands
            if expr.primitive == "square":
                written = "mul" if primitive.primitive == "mul" else "square"
                other = match.other_square or match.pattern.squares != {written}
                grown = replace(grown, other_square=other)
            if primitive.primitive == expr.primitive:
                yield from self._unify_all(expr.args, primitive.operands, value, grown)
                if primitive.primitive in ("add", "mul") and a is not rest[0]:
                    yield from self._unify_all(expr.args, (rest[0], a), value, grown)
            elif expr.primitive == "square" and primitive.primitive == "mul":
                yield from self._unify_all(expr.args * 2, primitive.operands, value, grown)
            elif primitive.primitive == "pow" and (power := power_of(expr)) is not None:
                base, exponent = power
                if isinstance(rest[0], Node):
                    detail = f"pow with a tensor exponent differs in the last bit: write the number {exponent}"
                    grown = replace(grown, flaw=grown.flaw or Flaw("tensor_exponent", detail))
                elif rest[0] != exponent:
                    return
                grown = replace(grown, floating=grown.floating or isinstance(rest[0], float))
                yield from self._unify_all((base,), (a,), value, grown)

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
        if match.inputs.get(input.name, source) is source:
            yield replace(
                match,
                inputs={**match.inputs, input.name: source},
                names={**match.names, value: name},
                packing=tuple(dict.fromkeys((*match.packing, *packing))),
                reads=tuple(dict.fromkeys((*match.reads, reader))),
            )

    def _flaw(self, match: Match) -> Flaw | None:
        """The first reason why rewriting ``match`` could change a result, or save nothing."""
        for node in match.covered:
            users = [user for user in node.users if user not in match.covered]
            if node is not match.root and users:
                user = "is returned" if users[0].op == "output" else f"is also used by '{users[0].name}'"
                return Flaw("escapes", f"the intermediate result '{node.name}' {user}: {_NO_GAIN}")
        kept = next((tensor for tensor in match.tensors if tensor in match.covered), None)
        if kept is not None:
            return Flaw("escapes", f"'{kept.name}' is both an input of the op and computed by it: {_NO_GAIN}")
        # A view's own shape is fixed when it is taken, so a packed tensor is read where it is split.
        places = [self.position[node] for node in (*match.packing, *match.covered)]
        switch = next((node for at, node in self.switches if min(places) < at < self.position[match.root]), None)
        if switch is not None:
            detail = f"'{switch.name}' changes grad mode, inference mode or autocast inside it: write it in one mode"
            return Flaw("mode_change", detail)
        first = min(self.position[node] for node in (*match.packing, *match.reads))
        for node in (node for node, primitive in match.covered.items() if primitive.inplace):
            written = match.covered[node].operands[0]
            assert isinstance(written, Node)
            seen = self.aliases.seen_after(written, node, match.covered)
            if seen is not None:
                detail = f"'{node.name}' writes into memory that '{seen.name}' may see: use the out-of-place form"
                return Flaw("inplace", detail)
        writer = self.aliases.write_after(match.tensors, first, own=match.covered)
        if writer is not None:
            detail = f"'{writer.name}' may write to the op's input after it is read: write out of place, or clone it"
            return Flaw("mutated", detail)
        for tensor in match.tensors:
            if not self._is_tensor(tensor, match):
                detail = (
                    f"'{tensor.name}' may be a number: capture with torch.compile or torch.export, which know types"
                )
                return Flaw("unknown_type", detail)
        return self._dtype_flaw(match)

    def _dtype_flaw(self, match: Match) -> Flaw | None:
        if match.other_square and self.autocast:
            detail = "under autocast a product and a square have different types: write the square as the op does"
            return Flaw("dtype_change", detail)
        values = [value_of(node) for node in (*match.tensors, match.root)]
        if all(isinstance(value, torch.Tensor) for value in values):
            *operands, result = (value.dtype for value in values)
            expected = operands[0]
            for dtype in operands[1:]:
                expected = torch.promote_types(expected, dtype)
            if match.params and not expected.is_floating_point:
                return Flaw("dtype_change", f"the op's params are floats, which would change {expected}: cast outside")
            if result != expected:
                return Flaw("dtype_change", f"the result is {result} where the operands give {expected}: cast outside")
        elif match.floating:
            detail = (
                "a literal here gives integers another type than the op does, and the types are not known: write "
                "'** 2', an op's constant as an int and its param as a float, or capture with torch.compile"
            )
            return Flaw("unknown_type", detail)
        return None

    def _is_tensor(self, node: Node, match: Match) -> bool:
        """Whether an input is known to be a tensor: Python numbers are added and multiplied by the same operators."""
        if value_of(node) is not None:
            return isinstance(value_of(node), torch.Tensor)
        if node not in match.names or node.op in ("get_attr", "call_module"):  # a packed tensor, or a layer's result
            return True
        if any(node in s.operands and not s.by_operator for s in map(match.covered.__getitem__, match.reads)):
            return True
        return node.op == "call_function" and torch.overrides.resolve_name(node.target) is not None


def _broadcasts(match: Match) -> bool:
    """Whether the op's broadcast inputs are known to have the shapes that it declares: x + y may be full tensors."""
    inputs = match.spec.inputs
    if not any(input.layout.broadcast for input in inputs):
        return True
    values = [value_of(tensor) for tensor in match.tensors]
    if not all(isinstance(value, torch.Tensor) for value in values):
        return False
    shape = logical_shape(inputs[0].layout, values[0].shape)
    broadcast = [(input, value) for input, value in zip(inputs, values) if input.layout.broadcast]
    return shape is not None and all(is_broadcast_to(input.layout, value.shape, shape) for input, value in broadcast)


def _switches_mode(node: Node) -> bool:
    """Whether ``node`` changes how the nodes behind it run, as in ``torch._C._set_grad_enabled(False)``."""
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    return name.startswith(("_set_", "_enter_", "_exit_")) or name.endswith("crement_nesting")
