"""The closed vocabulary: what each primitive means, how it is differentiated.

A primitive's meaning *is* the torch function it names by dotted path, so this file needs no torch. Its gradient is
written in the same language, one expression per argument, over the argument names and ``grad``. How each target spells
a primitive stands in one table per target (`relu2ir/providers/*.py`); how user graphs spell it, in
`relu2ir/fx/spellings.py`. A completeness test names a missing row.

Gradients are PyTorch's own, with its conventions at the edges: relu passes NaN through (``where(x <= 0, 0, grad)``,
not ``where(x > 0, grad, 0)``), and is 0 at 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Primitive:
    """One row: ``torch`` is the dotted path of its meaning, called with ``keywords``; ``gradient`` one expression per
    argument (None: none). Of the arguments, ``tensors`` must read an input of the op and ``numbers`` must not.
    ``formula`` is the same value by other primitives, so that it neither overflows nor cancels: what kernels compute.

    ``rounds`` is False when the result in a half type is exact given its inputs, so that rounding it changes nothing:
    an op all of whose intermediate results are such is bit-equal fused or not. ``correctly_rounded`` is False where
    torch itself, or a kernel, may be an ulp or two from the nearest number.
    """

    name: str
    args: tuple[str, ...]
    torch: str
    gradient: tuple[str | None, ...]
    formula: str = ""
    keywords: Mapping[str, str] = field(default_factory=dict)
    tensors: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    rounds: bool = True
    correctly_rounded: bool = True
    is_condition: bool = False


def _row(name: str, args: str, torch: str, *gradient: str | None, **more: Any) -> tuple[str, Primitive]:
    return name, Primitive(name, tuple(args.split()), torch, gradient, **more)


_EXACT: dict[str, Any] = {"rounds": False}
_APPROXIMATE: dict[str, Any] = {"correctly_rounded": False}
_BOUND: dict[str, Any] = {"rounds": False, "tensors": ("x",)}
_BOTH: dict[str, Any] = {"rounds": False, "tensors": ("a", "b")}

# 2 * sqrt(2 / pi) * (x + 0.044715 x^3), and the factor of x^2 in its derivative.
_U, _V = "1.5957691216057308 * (x + 0.044715 * (x * x * x))", "0.21406444881780074"

PRIMITIVES: dict[str, Primitive] = dict([
    # ** 1 -- operators **
    _row("neg", "x", "torch.neg", "-grad", **_EXACT),
    _row("add", "a b", "torch.add", "grad", "grad"),
    _row("sub", "a b", "torch.sub", "grad", "-grad"),
    _row("mul", "a b", "torch.mul", "grad * b", "grad * a"),
    _row("div", "a b", "torch.div", "grad / b", "-grad * (a / b / b)"),
    # ** 2 -- choice **
    _row("lt", "a b", "torch.lt", None, None, is_condition=True, **_EXACT),
    _row("le", "a b", "torch.le", None, None, is_condition=True, **_EXACT),
    _row("gt", "a b", "torch.gt", None, None, is_condition=True, **_EXACT),
    _row("ge", "a b", "torch.ge", None, None, is_condition=True, **_EXACT),
    _row("where", "c a b", "torch.where", None, "where(c, grad, 0)", "where(c, 0, grad)", **_EXACT),
    # Where both are equal, each gets half.
    _row("minimum", "a b", "torch.minimum", "where(a > b, 0, where(a >= b, grad / 2, grad))",
         "where(a < b, 0, where(a <= b, grad / 2, grad))", **_BOTH),
    _row("maximum", "a b", "torch.maximum", "where(a < b, 0, where(a <= b, grad / 2, grad))",
         "where(a > b, 0, where(a >= b, grad / 2, grad))", **_BOTH),
    # At a bound all goes to x. NaN gets none, as in torch.
    _row("clamp_min", "x low", "torch.clamp_min", "where(x >= low, grad, 0)", "where(x < low, grad, 0)", **_BOUND),
    _row("clamp_max", "x high", "torch.clamp_max", "where(x <= high, grad, 0)", "where(x > high, grad, 0)", **_BOUND),
    _row("clamp", "x low high", "torch.clamp", "where(x >= low, where(x <= high, grad, 0), 0)", None, None,
         formula="clamp_max(clamp_min(x, low), high)", numbers=("low", "high"), **_BOUND),
    _row("abs", "x", "torch.abs", "where(x > 0, grad, where(x < 0, -grad, 0 * grad))", **_EXACT),
    # ** 3 -- powers and exponentials **
    _row("square", "x", "torch.square", "grad * (2 * x)"),
    # MKL's float32 root misses by 1 ulp in one of 35,000 (torch 2.13, CPU).
    _row("sqrt", "x", "torch.sqrt", "grad / (2 * sqrt(x))", **_APPROXIMATE),
    _row("exp", "x", "torch.exp", "grad * exp(x)", **_APPROXIMATE),
    _row("expm1", "x", "torch.expm1", "grad * (expm1(x) + 1)", **_APPROXIMATE),
    _row("log1p", "x", "torch.log1p", "grad / (x + 1)", **_APPROXIMATE),
    _row("tanh", "x", "torch.tanh", "grad * (1 - square(tanh(x)))", **_APPROXIMATE),
    _row("erf", "x", "torch.erf", "grad * (1.1283791670955126 * exp(-square(x)))", **_APPROXIMATE),
    _row("erfc", "x", "torch.special.erfc", "grad * (-1.1283791670955126 * exp(-square(x)))", **_APPROXIMATE),
    # ** 4 -- activations **
    _row("relu", "x", "torch.relu", "where(x <= 0, 0, grad)", **_EXACT),
    # exp(-|x|) is at most 1; exp(-x) overflows from x = -88.8 down, where silu is still a normal number.
    _row("sigmoid", "x", "torch.sigmoid", "grad * (1 - sigmoid(x)) * sigmoid(x)",
         formula="where(x < 0, exp(-abs(x)), 1) / (1 + exp(-abs(x)))", **_APPROXIMATE),
    _row("silu", "x", "torch.nn.functional.silu", "grad * sigmoid(x) * (1 + x * (1 - sigmoid(x)))",
         formula="x * sigmoid(x)", **_APPROXIMATE),
    # From 20 on x itself, as in torch, which in float64 is 1e-10 off there.
    _row("softplus", "x", "torch.nn.functional.softplus", "where(x > 20, grad, grad * sigmoid(x))",
         formula="where(x > 20, x, log1p(exp(x)))", **_APPROXIMATE),
    # By erfc: 1 + erf(x / sqrt(2)) is 0 in float32 from x = -5.5 down.
    _row("gelu", "x", "torch.nn.functional.gelu",
         "grad * (0.5 * erfc(x * -0.7071067811865476) + x * (exp(-0.5 * square(x)) * 0.3989422804014327))",
         formula="0.5 * x * erfc(x * -0.7071067811865476)", **_APPROXIMATE),
    # 0.5 * (1 + tanh(u)) is sigmoid(2 * u), which does not cancel.
    _row("gelu_tanh", "x", "torch.nn.functional.gelu",
         f"grad * (sigmoid({_U}) + x * sigmoid({_U}) * (1 - sigmoid({_U})) * (1.5957691216057308 + {_V} * square(x)))",
         formula=f"x * sigmoid({_U})", keywords={"approximate": "tanh"}, **_APPROXIMATE),
])  # fmt: skip
