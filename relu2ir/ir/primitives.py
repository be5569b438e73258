"""The closed vocabulary: what each primitive means, how it is differentiated.

A primitive's meaning *is* the torch function it names by dotted path, so this file needs no torch. Its gradient is
written in the same language, one expression per argument, over the argument names and ``grad``. How each target spells
a primitive stands in one table per target (`relu2ir/providers/*.py`); how user graphs spell it, in
`relu2ir/fx/spellings.py`. A completeness test names a missing row.

Gradients are PyTorch's own, with its conventions at the edges: relu passes NaN through (``where(x <= 0, 0, grad)``,
not ``where(x > 0, grad, 0)``), and is 0 at 0.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Primitive:
    """One row: ``torch`` is the dotted path of its meaning, ``gradient`` one expression per argument (None: none).

    ``rounds`` is False when the result in a half type is exact given its inputs, so that rounding it changes nothing:
    an op all of whose intermediate results are such is bit-equal fused or not.
    """

    name: str
    args: tuple[str, ...]
    torch: str
    gradient: tuple[str | None, ...]
    rounds: bool = True
    is_condition: bool = False


def _row(name: str, args: str, torch: str, *gradient: str | None, **flags: bool) -> tuple[str, Primitive]:
    return name, Primitive(name, tuple(args.split()), torch, gradient, **flags)


PRIMITIVES: dict[str, Primitive] = dict([
    # ** 1 -- operators **
    _row("neg", "x", "torch.neg", "-grad", rounds=False),
    _row("add", "a b", "torch.add", "grad", "grad"),
    _row("sub", "a b", "torch.sub", "grad", "-grad"),
    _row("mul", "a b", "torch.mul", "grad * b", "grad * a"),
    _row("div", "a b", "torch.div", "grad / b", "-grad * (a / b / b)"),
    # ** 2 -- choice **
    _row("lt", "a b", "torch.lt", None, None, rounds=False, is_condition=True),
    _row("le", "a b", "torch.le", None, None, rounds=False, is_condition=True),
    _row("gt", "a b", "torch.gt", None, None, rounds=False, is_condition=True),
    _row("ge", "a b", "torch.ge", None, None, rounds=False, is_condition=True),
    _row("where", "c a b", "torch.where", None, "where(c, grad, 0)", "where(c, 0, grad)", rounds=False),
    # ** 3 -- powers **
    _row("square", "x", "torch.square", "grad * (2 * x)"),
    _row("sqrt", "x", "torch.sqrt", "grad / (2 * sqrt(x))"),
    # ** 4 -- activations **
    _row("relu", "x", "torch.relu", "where(x <= 0, 0, grad)", rounds=False),
    _row("sigmoid", "x", "torch.sigmoid", "grad * (1 - sigmoid(x)) * sigmoid(x)"),
    _row("silu", "x", "torch.nn.functional.silu", "grad * sigmoid(x) * (1 + x * (1 - sigmoid(x)))"),
])  # fmt: skip
