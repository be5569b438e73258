"""Whether a match may be rewritten: each reason why not has a stable code, and says what to change."""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property

import torch
from torch import nn
from torch.fx import Graph, Node

from relu2ir.fx.alias import Aliases
from relu2ir.fx.match import Match
from relu2ir.fx.packing import value_of
from relu2ir.fx.patterns import Flaw
from relu2ir.fx.shapes import has_strides_of_op

_NO_GAIN = "it must be computed anyway, so fusing would save nothing"


class Checker:
    """Judges the matches of one graph over ``root``.

    ``autocast``: it runs, in whole or in part, under autocast. ``inference``: no gradient will flow. ``exact``: results
    may not be rounded less often. ``nested``: another graph runs it.
    """

    def __init__(
        self,
        graph: Graph,
        root: nn.Module,
        autocast: bool = False,
        inference: bool = False,
        exact: bool = False,
        nested: bool = False,
    ) -> None:
        self.graph, self.root, self.autocast, self.inference, self.exact = graph, root, autocast, inference, exact
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.switches = [node for node in graph.nodes if _switches_mode(node)]
        self.switched_at = [self.position[node] for node in self.switches]
        # Dynamo guards on the inputs of its graph, not on those of a region: the first carry of a scan needs no
        # gradient and the next may. A transform differentiates what requires none.
        self.records_gradients = not nested and not any(map(_differentiates, graph.nodes))

    @cached_property
    def aliases(self) -> Aliases:
        return Aliases(self.graph, self.root)

    def flaw(self, match: Match) -> Flaw | None:
        """The first reason why rewriting ``match`` could change a result, or save nothing."""
        for node in match.covered:
            users = [user for user in node.users if user not in match.covered and not is_assertion(user)]
            if node is not match.root and users:
                user = "is returned" if users[0].op == "output" else f"is also used by '{users[0].name}'"
                return Flaw("escapes", f"the intermediate result '{node.name}' {user}: {_NO_GAIN}")
        kept = next((tensor for tensor in match.tensors if tensor in match.covered), None)
        if kept is not None:
            return Flaw("escapes", f"'{kept.name}' is both an input of the op and computed by it: {_NO_GAIN}")
        # A view's own shape is fixed when it is taken, so a packed tensor is read where it is split.
        places = [self.position[node] for node in (*match.packing, *match.covered)]
        following = bisect_right(self.switched_at, min(places))
        if following < len(self.switches) and self.switched_at[following] < self.position[match.root]:
            switch = self.switches[following]
            detail = f"'{switch.name}' changes grad mode, inference mode or autocast inside it: write it in one mode"
            return Flaw("mode_change", detail)
        first = min(self.position[node] for node in (*match.packing, *match.reads))
        for node in (node for node, primitive in match.covered.items() if primitive.inplace):
            written = match.covered[node].operands[0]
            assert isinstance(written, Node)
            if node is match.root and written not in match.covered:
                detail = f"'{node.name}' writes into an operand, whose type and layout it keeps: write out of place"
                return Flaw("inplace", detail)
            seen = self.aliases.seen_after(written, node)  # the op's own later reads too
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
        no_gradient = self.inference or (self.records_gradients and all(map(_records_no_gradient, match.tensors)))
        if match.forward_only and not no_gradient:
            detail = (
                "the value is the op's, the gradient at NaN or at a bound is not: write relu or clamp, or fuse with "
                "inference=True where no gradient will flow"
            )
            return Flaw("gradient", detail)
        if not has_strides_of_op(match.spec, match.tensors, match.root):
            return Flaw("strides", "the result has other strides than the op's: write the op's first input first")
        return self._dtype_flaw(match)

    def _dtype_flaw(self, match: Match) -> Flaw | None:
        if match.other_square and self.autocast:
            detail = "under autocast a product and a square have different types: write the square as the op does"
            return Flaw("dtype_change", detail)
        values = [value_of(node) for node in (*match.tensors, match.root)]
        if match.casts:
            reason = None
            if self.exact:
                reason = "it is rounded once there and twice here"
            elif match.unrounded:
                reason = "float32 is kept over several steps, which plain PyTorch rounds one by one"
            elif len({getattr(value, "dtype", None) for value in values}) > 1:
                reason = "the operands' type is not the result's"
            if reason is not None:
                return Flaw("cast", f"a cast stands inside, and {reason}: cast outside")
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
        if _reaches_a_function(node, match):
            return True
        return node.op == "call_function" and torch.overrides.resolve_name(node.target) is not None


def _reaches_a_function(node: Node, match: Match) -> bool:
    """Whether a function of torch takes ``node``, or what operators make of it and numbers alone."""
    for reader, primitive in match.covered.items():
        if node not in primitive.operands:
            continue
        alone = all(operand is node or not isinstance(operand, Node) for operand in primitive.operands)
        if not primitive.by_operator or (alone and _reaches_a_function(reader, match)):
            return True
    return False


def is_assertion(node: Node) -> bool:
    """Whether ``node`` only asserts the type of what it reads, as torch.export writes in front of a cast."""
    return node.target is torch.ops.aten._assert_tensor_metadata.default


def _records_no_gradient(node: Node) -> bool:
    """Whether Dynamo, which guards on it, saw a tensor that requires no gradient. torch.export does not know."""
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and not value.requires_grad


def _switches_mode(node: Node) -> bool:
    """Whether ``node`` changes how the nodes behind it run, as in ``torch._C._set_grad_enabled(False)``."""
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    return name.startswith(("_set_", "_enter_", "_exit_")) or name.endswith("crement_nesting")


def _differentiates(node: Node) -> bool:
    """Whether ``node`` belongs to a transform of torch.func, or to forward-mode differentiation."""
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    return name.endswith("crement_nesting") or name in ("_make_dual", "make_dual", "_enter_dual_level")
