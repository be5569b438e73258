"""The expressions of a spec file: parsed, their names and calls checked, a problem shown where it stands.

Needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import yaml

from relu2ir.errors import ExprError, suggestion
from relu2ir.ir.emit import used_names
from relu2ir.ir.expr import Call, Expr, Name, fold
from relu2ir.ir.parse import parse
from relu2ir.ir.primitives import PRIMITIVES
from relu2ir.yamltree import YamlTree

MAX_EXCERPT = 200
# What Python numbers can do too.
ARITHMETIC = ("neg", "add", "sub", "mul", "div")

_BOUNDS = (
    "minimum and maximum are of two tensors, clamp is between two numbers, clamp_min(x, low) and clamp_max(x, high) "
    "take either"
)


@dataclass(frozen=True)
class Reads:
    """The names that an expression may read: elements of tensors, and numbers."""

    tensors: Collection[str]
    numbers: Collection[str]


def read_expr(tree: YamlTree, node: yaml.Node, what: str, where: str, reads: Reads | None) -> Expr | None:
    """The expression at ``node``, or None with a problem noted; its names are checked unless ``reads`` is None."""
    if isinstance(node, yaml.ScalarNode) and node.tag != "tag:yaml.org,2002:null":
        text = node.value  # a bare number is an expression too, though YAML tags it so
    else:
        tree.problem(node, where, f"{what} must be text, such as square(relu(x))")
        return None
    try:
        expr = parse(text)
        if reads is not None:
            _check_names(expr, text, reads)
            _check_calls(expr, text, reads.tensors)
    except ExprError as error:
        _expr_problem(tree, node, what, where, error)
        return None
    return expr


def _check_names(expr: Expr, text: str, reads: Reads) -> None:
    """ExprError for a name that is not declared, and for an expression that is nothing but a name."""
    known = [*reads.tensors, *reads.numbers]
    for name in used_names([expr]):
        if name not in known:
            found = re.search(rf"\b{name}\b", text)
            message = f"unknown name '{name}'{suggestion(name, known)}"
            raise ExprError(message, found.start() if found else 0, len(name))
    if isinstance(expr, Name):
        message = f"'{expr.name}' alone would return the input itself; an op computes a new tensor"
        raise ExprError(message, 0, len(text))


def _check_calls(expr: Expr, text: str, tensors: Collection[str]) -> None:
    """ExprError for a call on numbers where torch takes tensors, or the reverse: plain PyTorch could not run it."""

    def visit(node: Expr, args: list[bool]) -> bool:
        if isinstance(node, Call):
            problem = _operand_problem(node, args)
            if problem:
                raise ExprError(problem, 0, len(text))
        return any(args) or (isinstance(node, Name) and node.name in tensors)

    fold([expr], visit)


def _operand_problem(node: Call, reads: Sequence[bool]) -> str | None:
    """What is wrong with the operands of ``node``, of which each ``reads`` an input of the op or is a number."""
    row = PRIMITIVES[node.primitive]
    if node.primitive == "where":
        if reads[0] and not any(reads[1:]):
            return f"the values of '{node}' read no input; write a number or a param in its place"
    elif not any(reads) and node.primitive not in ARITHMETIC and not row.is_condition:
        return f"'{node}' reads no input; write a number or a param in its place"
    for name, arg, reading in zip(row.args, node.args, reads):
        if name in row.tensors and not reading:
            return f"'{arg}' in '{node}' reads no input; {_BOUNDS}"
        if name in row.numbers and reading:
            return f"'{arg}' in '{node}' reads an input; {_BOUNDS}"
    return None


def _expr_problem(tree: YamlTree, node: yaml.Node, what: str, where: str, error: ExprError) -> None:
    """The place inside the expression, with the expression and a caret under it."""
    line = "".join(char if char.isprintable() else " " for char in node.value).rstrip()[:MAX_EXCERPT]
    # The column follows where the file spells the expression as it is read: not in a block, nor behind an escape.
    quote = 1 if getattr(node, "style", None) in ("'", '"') else 0
    written = tree.text[node.start_mark.index + quote : node.end_mark.index - quote]
    start = error.start + quote if written == node.value else 0
    if error.start < MAX_EXCERPT:
        caret = "^" * max(1, min(error.width, len(line) - error.start))
        excerpt = f"    {line}\n    {' ' * error.start}{caret} {error.message}"
    else:
        excerpt = f"    {error.message} (character {error.start + 1})"
    tree.problem(node, where, f"cannot read {what}", start, excerpt, relation=True)
