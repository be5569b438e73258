"""Raising matches in a graph: each becomes one call of its op, and nothing else of the graph is touched."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterable

import torch
from torch import nn
from torch.fx import Graph, Node

from relu2ir.fx.check import Checker, is_assertion
from relu2ir.fx.match import Match, Matcher
from relu2ir.fx.patterns import Pattern

_TORCH = os.path.dirname(torch.__file__) + os.sep


def raise_ops(graph: Graph, root: nn.Module, patterns: list[Pattern], **how: bool) -> tuple[list[Match], list[Match]]:
    """Rewrite ``graph`` in place; the matches and the near misses. Matches still hold the nodes that they replaced.

    ``how`` is what `Checker` takes.
    """
    found, near = find_ops(graph, root, patterns, **how)
    position = {node: i for i, node in enumerate(graph.nodes)}
    replaced: dict[Node, Node] = {}
    for match in found:
        replaced[match.root] = _replace(graph, match, position, replaced)
    return found, near


def find_ops(graph: Graph, root: nn.Module, patterns: list[Pattern], **how: bool) -> tuple[list[Match], list[Match]]:
    """The matches and the near misses of ``graph``, which is left as it is."""
    return Matcher(graph, root).find(patterns, Checker(graph, root, **how).flaw)


def _replace(graph: Graph, match: Match, position: dict[Node, int], replaced: dict[Node, Node]) -> Node:
    # Where the last input was read: a later place might see another value, an earlier one not all inputs.
    at = max(match.reads, key=position.__getitem__)
    op = getattr(getattr(torch.ops, match.spec.namespace), match.spec.name).default
    args = tuple(replaced.get(tensor, tensor) for tensor in match.tensors)
    with graph.inserting_before(at):
        node = graph.create_node("call_function", op, args, dict(match.params), name=match.spec.name)
    node.meta = copy.copy(match.root.meta)
    match.root.replace_all_uses_with(node)
    # Only what this rewrite has left without a reader; eliminate_dead_code() would drop the user's square_().
    for dead in sorted([*match.covered, *match.packing], key=position.__getitem__, reverse=True):
        for user in [user for user in dead.users if dead is not match.root and is_assertion(user)]:
            graph.erase_node(user)
        if not dead.users:
            graph.erase_node(dead)
    return node


def region_bodies(graph: Graph) -> dict[str, Node]:
    """The names of the graph modules that ``graph`` hands to higher-order operators, with the first such call."""
    calls = [node for node in graph.nodes if isinstance(node.target, torch._ops.HigherOrderOperator)]
    operands = [(node, operand) for node in calls for operand in node.all_input_nodes]
    bodies: dict[str, Node] = {}
    for node, operand in operands:
        if operand.op == "get_attr":
            bodies.setdefault(str(operand.target), node)
    return bodies


def path_of(node: Node) -> str:
    """The module in which ``node`` was written, as the capture recorded it: ``layers.0.mlp.act_fn``."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed([entry[0] for entry in stack.values()]), "") if stack else ""
    return re.sub(r"^(L\['\w+'\]|_export_root)\.?", "", path)


def source_of(nodes: Iterable[Node]) -> str:
    """``model.py:12``: the line that wrote the first of ``nodes`` that knows its line."""
    for node in nodes:
        lines = re.findall(r'File "([^"]+)", line (\d+)', node.stack_trace or "")
        if lines:
            # The last of a user's own: regions end in the text of a generated body, or in torch's call of it.
            own = [line for line in lines if not line[0].startswith(("<", _TORCH))]
            return ":".join((own or lines)[-1])
    return ""
