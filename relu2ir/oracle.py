"""What the result of an op may be: the oracle to which the tests hold every provider.

It follows from the expression. Fused kernels compute in float32 for half types and in the type itself otherwise, and
round once: an op of correctly rounded operations has one right answer, down to the bit. Where others take part
(sqrt, sigmoid, silu), each may be 2 ulp off, and the bound is what these errors can add up to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch

from relu2ir.ir.emit import expanded, used_names
from relu2ir.ir.expr import Call, Const, Expr, Name, fold, postorder
from relu2ir.ir.parse import parse
from relu2ir.ir.primitives import PRIMITIVES
from relu2ir.spec import Layout, OpSpec, Output

WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}


def torch_function(primitive: str) -> Callable[..., torch.Tensor]:
    """The torch function that ``primitive`` means."""
    row = PRIMITIVES[primitive]
    module, _, name = row.torch.rpartition(".")
    return partial(getattr(import_module(module), name), **row.keywords)


def evaluate(expr: Expr, values: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """``expr`` in ``dtype``, each operation by torch and rounded by itself: what every kernel must agree with."""

    def visit(node: Expr, args: list[torch.Tensor]) -> torch.Tensor:
        if isinstance(node, Name):
            return values[node.name]
        if isinstance(node, Const):
            return torch.tensor(node.value, dtype=dtype)
        assert isinstance(node, Call)
        return torch_function(node.primitive)(*args)

    return fold([expr], visit)[expr]


def reference(spec: OpSpec) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The op as it is meant: computed in the wider type, stably, and rounded once; one result per output."""

    def run(*args: Any) -> tuple[torch.Tensor, ...]:
        dtype = args[0].dtype
        outputs = [replace(output, exprs=tuple(expanded(output.exprs))) for output in spec.outputs]
        return tuple(value.to(dtype) for value in _outputs(spec, args, WIDER.get(dtype, dtype), outputs))

    return run


def _outputs(
    spec: OpSpec, args: Sequence[Any], dtype: torch.dtype, outputs: Sequence[Output] | None = None
) -> list[torch.Tensor]:
    values = scalars(spec, args, dtype)
    shape = values[spec.parts[0]].shape
    return [
        packed(output.layout, [evaluate(expr, values, dtype).expand(shape) for expr in output.exprs])
        for output in outputs or spec.outputs
    ]


def scalars(spec: OpSpec, args: Sequence[Any], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Each scalar name of ``spec`` with its values in ``dtype``, from the op's tensors in order and then its params."""
    values: dict[str, torch.Tensor] = {}
    for input, tensor in zip(spec.inputs, args):
        wide = tensor.to(dtype)
        if not input.layout.packed:
            parts: Sequence[torch.Tensor] = [wide]
        elif input.layout is Layout.halves:
            parts = wide.chunk(2, -1)
        else:
            parts = [wide[..., 0::2], wide[..., 1::2]]
        values |= dict(zip(input.parts, parts))
    params = args[len(spec.inputs) :] or spec.params.values()
    return values | {name: torch.tensor(value, dtype=dtype) for name, value in zip(spec.params, params)}


def packed(layout: Layout, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor laid out as ``layout`` says, of one tensor per part."""
    if layout is Layout.plain:
        return parts[0]
    return torch.cat(list(parts), -1) if layout is Layout.halves else torch.stack(list(parts), -1).flatten(-2)


def rounding_errors(spec: OpSpec, args: Sequence[Any], dtype: torch.dtype) -> list[torch.Tensor]:
    """How far from the exact result an evaluation in ``dtype`` may be, per output, to first order, in float64.

    Each operation that rounds adds 1 ulp of its result, 2 where it is not correctly rounded (there a library may also
    flush a subnormal, as Triton's erfc does), and hands on what its arguments bring, by its derivative.
    """
    eps, least, flushed = torch.finfo(dtype).eps, smallest(dtype), torch.finfo(dtype).smallest_normal
    values = scalars(spec, args, torch.float64)
    one = torch.ones((), dtype=torch.float64)

    def visit(node: Expr, args: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(node, Name):
            return values[node.name], 0 * one
        if isinstance(node, Const):
            return node.value * one, abs(node.value) * eps * one
        assert isinstance(node, Call)
        row = PRIMITIVES[node.primitive]
        value = torch_function(node.primitive)(*(value for value, _ in args))
        error = 0 * one
        if row.rounds:
            error = value.abs() * eps + least if row.correctly_rounded else value.abs() * (2 * eps) + flushed
        scope = dict(zip(row.args, (value for value, _ in args))) | {"grad": one}
        for rule, (_, brought) in zip(row.gradient, args):
            if rule is not None:
                slope = evaluate(parse(rule, conditions=("c",)), scope, torch.float64).abs()
                error = error + (slope * brought).nan_to_num(0.0)
        return value, error.nan_to_num(0.0)

    found = fold(expanded(spec.exprs), visit)
    shape = values[spec.parts[0]].shape
    written = [expanded(output.exprs) for output in spec.outputs]
    return [packed(out.layout, [found[e][1].expand(shape) for e in es]) for out, es in zip(spec.outputs, written)]


def smallest(dtype: torch.dtype) -> float:
    """The smallest positive number of ``dtype``, a subnormal."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def ulp(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance between neighbours of ``dtype`` at each of ``values``, which are float64."""
    exponent = torch.frexp(values).exponent
    unit = torch.ldexp(torch.ones_like(values), exponent - 1) * torch.finfo(dtype).eps
    return torch.where(values == 0, 0, unit).clamp(min=smallest(dtype))


def mismatches(
    spec: OpSpec, args: Sequence[Any], results: Sequence[torch.Tensor], compute: torch.dtype | None = None
) -> list[str]:
    """What is wrong with ``results``, one line each; none when they are right.

    There is one result per output; of a gradient op one per input of the op, where it broadcasts summed to its shape.
    ``compute`` is the type in which plain PyTorch computes; without it the results are a fused kernel's. Runs on the
    CPU.
    """
    args = [arg.detach().cpu() if isinstance(arg, torch.Tensor) else arg for arg in args]
    dtype, plain = args[0].dtype, compute is not None
    compute = compute or (torch.float64 if dtype == torch.float64 else torch.float32)
    own = [value.to(dtype) for value in _outputs(spec, args, compute)]
    calls = [node for node in postorder(spec.exprs) if isinstance(node, Call)]
    # torch divides by a number by multiplying with its inverse (2.11, CUDA).
    inverse = plain and any(c.primitive == "div" and not {*spec.parts} & {*used_names([c.args[1]])} for c in calls)
    rounded = not inverse and all(PRIMITIVES[call.primitive].correctly_rounded for call in calls)
    if spec.exact or (rounded and compute != dtype) or (rounded and dtype in (torch.float32, torch.float64)):
        allowed = [torch.zeros_like(value, dtype=torch.float64) for value in own]
        wide = own
    else:
        wide = list(reference(spec)(*args))
        tolerance = max(torch.finfo(dtype).eps, spec.tolerance.get(str(dtype).removeprefix("torch."), 0.0))
        errors = rounding_errors(spec, args, compute)
        allowed = [
            e + v.double().abs().nan_to_num(0.0, 0.0, 0.0) * tolerance + smallest(dtype) for e, v in zip(errors, wide)
        ]
        if plain:
            allowed = [slack + lost for slack, lost in zip(allowed, _lost_by_torch(spec, args))]
    names, bounds = [output.name for output in spec.outputs], list(zip(own, wide, allowed))
    if spec.forward is not None:
        names, outputs = [input.name for input in spec.forward.inputs], bounds
        bounds = [outputs[i] for i in spec.gradient_outputs]
        for i, (input, result) in enumerate(zip(spec.forward.inputs, results)):
            if input.layout.broadcast:
                bounds[i] = _summed(*bounds[i], result.shape, compute)
    problems = []
    for name, (low, high, slack), result in zip(names, bounds, results, strict=True):
        problem = _mismatch(result.detach().cpu(), low, high, slack)
        if problem:
            problems.append(f"{name}{problem}")
    return problems


def _lost_by_torch(spec: OpSpec, args: Sequence[Any]) -> list[torch.Tensor]:
    """What torch's own formulas may lose beside the stable ones, per output: 4 ulp of the product of all operands.

    They cancel, as 1 + erf(x) does in gelu; where that product overflows their gradients may too, as inf * 0 or as
    grad * exp(x) / (1 + exp(x)), and then anything is right.
    """
    limits, values = torch.finfo(args[0].dtype), scalars(spec, args, torch.float64)
    size = torch.ones_like(values[spec.parts[0]])
    for name in (*spec.parts, *spec.params):
        size = size * values[name].abs().clamp(min=1).nan_to_num(1.0, torch.inf)
    lost = torch.where(size * 16 > limits.max, torch.inf, 4 * limits.eps * size)
    return [packed(output.layout, [lost] * len(output.exprs)) for output in spec.outputs]


def _summed(
    own: torch.Tensor, wide: torch.Tensor, allowed: torch.Tensor, shape: torch.Size, compute: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The bounds, and no slack, of a gradient that is summed to ``shape`` after its elements were stored.

    They add up what each element may be off by and what the summation may lose, in float32 for half types. A plain
    PyTorch gradient sums where it broadcast, and goes on with what it rounded there: a few units of its own type.
    """
    dtype, values = own.dtype, own.double()
    sums_in = torch.finfo(torch.promote_types(dtype, torch.float32))
    count = own.numel() // max(shape.numel(), 1)
    lost = count * sums_in.eps + (4 * torch.finfo(dtype).eps if compute == dtype else 0.0)
    off = (values - wide.double()).abs().nan_to_num(0.0, 0.0) + allowed
    size = (values.abs() + off).sum_to_size(shape)
    bound = off.sum_to_size(shape) + lost * size.nan_to_num(0.0)
    total = values.sum_to_size(shape)
    # Where a partial sum may overflow, the order of summation decides; NaN stays NaN.
    certain = (size < sums_in.max) | (own.isnan() & wide.isnan()).double().sum_to_size(shape).bool()
    slack = torch.zeros_like(bound).masked_fill(~certain, torch.inf)
    return (total - bound).to(dtype), (total + bound).to(dtype), slack


def _mismatch(got: torch.Tensor, own: torch.Tensor, wide: torch.Tensor, allowed: torch.Tensor) -> str | None:
    """Between the type's own value and the wide one (they part where an intermediate overflows), give or take.

    Where an infinite amount is ``allowed``, anything is right.
    """
    if got.dtype != own.dtype or got.shape != own.shape:
        return f" is {got.dtype} {list(got.shape)}; expected {own.dtype} {list(own.shape)}"
    value, a, b = got.double(), own.double(), wide.double()
    low, high = torch.minimum(a, b), torch.maximum(a, b)  # NaN if either is
    between = (value >= low - allowed) & (value <= high + allowed)
    near_one = ((value - a).abs() <= allowed) | ((value - b).abs() <= allowed)
    # One alone is NaN after an overflow, as inf * 0: then a differently factored formula gives inf as rightly.
    torn = (a.isnan() != b.isnan()) & (near_one | ~value.isfinite())
    right = between | torn | (a.isnan() & b.isnan() & value.isnan()) | allowed.isinf()
    if bool(right.all()):
        return None
    index = tuple((~right).nonzero()[0].tolist())
    wrong = int((~right).sum())
    return (
        f"{list(index)} is {value[index].item()!r}, expected {b[index].item()!r} ({wrong} of {got.numel()} are wrong)"
    )
