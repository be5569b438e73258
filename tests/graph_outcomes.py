"""What a call did: its results, its writes, what shares memory with what, its gradients; and how two calls differ."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from program_surroundings import renew
from random_graphs import Program
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import relu2ir
from relu2ir.fx.report import FuseResult

# What the sums of a gradient may differ by where they are added up in another order, of the largest.
_SUMS = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}


@dataclass(frozen=True)
class Captured:
    """A program in one form: ``models`` are what is fused; ``of`` gives what to call over them, fused or not.

    The call comes with the module that holds its buffers. Dynamo adds to ``models`` in the first call.
    """

    models: list[Any]
    of: Callable[[list[Any]], tuple[Callable[..., Any], nn.Module]]


def by_module(program: Program) -> Captured:
    return Captured([program.module()], lambda models: (models[0], models[0]))


def by_symbolic_trace(program: Program) -> Captured:
    module, tracer = program.module(), fx.Tracer()
    tracer.proxy_buffer_attributes = True
    traced = fx.GraphModule(module, tracer.trace(module))
    return Captured([traced], lambda models: (models[0].forward, models[0]))


def with_values(program: Program) -> Captured:
    """A symbolic trace whose nodes know their values, as `relu2ir.lower(module, *inputs)` makes it."""
    captured, mode = by_symbolic_trace(program), FakeTensorMode(allow_non_fake_inputs=True)
    inputs, _ = program.inputs()
    with mode:
        FakeTensorProp(captured.models[0], mode).propagate(*inputs)
    return captured


def by_dynamo(program: Program) -> Captured:
    """All through Dynamo's guards and bytecode, which run the graphs that were asked for."""
    module, captured, now = program.module(), [], []

    def keep(graph_module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        captured.append(graph_module)
        index = len(captured) - 1
        return lambda *args: (now or captured)[index].forward(*args)

    compiled = torch.compile(module, backend=keep)

    def call_over(models: list[Any]) -> tuple[Callable[..., Any], nn.Module]:
        now[:] = models
        return compiled, module

    return Captured(captured, call_over)


def by_export(program: Program) -> Captured:
    return _exported(program, decomposed=False)


def by_decomposed_export(program: Program) -> Captured:
    return _exported(program, decomposed=True)


def _exported(program: Program, decomposed: bool) -> Captured:
    inputs, _ = program.inputs()
    exported = torch.export.export(program.module(), tuple(inputs))
    if decomposed:
        exported = exported.run_decompositions()

    def call_over(models: list[Any]) -> tuple[Callable[..., Any], nn.Module]:
        module = models[0].module()
        return module.forward, module

    return Captured([exported], call_over)


CAPTURES = {
    "module": by_module,
    "symbolic_trace": by_symbolic_trace,
    "with_values": with_values,
    "dynamo": by_dynamo,
    "export": by_export,
    "decomposed": by_decomposed_export,
}


@dataclass
class Outcome:
    """What a call did. ``error``: it did not end; ``backward_error``: its backward did not."""

    error: str | None = None
    results: list[Any] = field(default_factory=list)
    state: list[torch.Tensor] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    backward_error: str | None = None


def outcome(run: Callable[..., Any], owner: nn.Module, program: Program) -> Outcome:
    """Call ``run`` on the program's inputs, ``owner`` holding its buffers, all new."""
    inputs, leaves = program.inputs()
    renew(owner, program.width, program.dtype)
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    torch.manual_seed(0)
    try:
        results = run(*inputs)
    except Exception as error:  # of a random program, whatever it is
        return Outcome(error=f"{type(error).__name__}: {error}")
    return _outcome([*results], tensors, [owner.state, owner.two], [*leaves, *owner.parameters()])


def _outcome(
    results: list[Any], inputs: list[torch.Tensor], held: list[torch.Tensor], leaves: list[torch.Tensor]
) -> Outcome:
    of_tensors = [value for value in results if isinstance(value, torch.Tensor)]
    storages = [tensor.untyped_storage().data_ptr() for tensor in (*inputs, *held, *of_tensors)]
    found = Outcome(
        results=[_kept(value) for value in results],
        state=[_kept(tensor) for tensor in (*inputs, *held)],
        shared=[storages.index(storage) for storage in storages],
    )
    loss = [_weighted(value) for value in of_tensors if value.requires_grad]
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    if loss and leaves:
        try:
            found.gradients = list(torch.autograd.grad(sum(loss), leaves, allow_unused=True))
        except RuntimeError as error:
            found.backward_error = str(error)
    return found


def _kept(value: Any) -> Any:
    """A copy of a tensor as it is now, with its strides and whether it requires a gradient."""
    if not isinstance(value, torch.Tensor):
        return value
    copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    with torch.no_grad():
        copy.copy_(value)
    return copy.requires_grad_(value.requires_grad)


def _weighted(value: torch.Tensor) -> torch.Tensor:
    return (value.double() * torch.linspace(-1, 2, value.numel(), dtype=torch.float64).view(value.shape)).sum()


def difference(plain: Outcome, fused: Outcome, exact: Outcome | None = None, strides: bool = True) -> str | None:
    """How ``fused`` differs from ``plain``, or None. Bits count, up to the sign of zero and the payload of NaN.

    With ``exact``, the same in float64, a result may also be as near to that as the plain one is, or a rounding.
    """
    if fused.error is not None:
        return f"raises {fused.error}"
    if plain.shared != fused.shared:
        return f"shares memory as {fused.shared}, not as {plain.shared}"
    known = [*exact.results, *exact.state] if exact is not None else [None] * len(plain.results + plain.state)
    for i, (a, b, c) in enumerate(zip(plain.results + plain.state, fused.results + fused.state, known, strict=True)):
        what = f"result {i}" if i < len(plain.results) else f"input or buffer {i - len(plain.results)}"
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            if a != b:
                return f"{what} is {b}, not {a}"
            continue
        for name, this, other in (
            ("dtype", a.dtype, b.dtype),
            ("shape", a.shape, b.shape),
            ("stride", strides and a.stride(), strides and b.stride()),
            ("requires_grad", a.requires_grad, b.requires_grad),
        ):
            if this != other:
                return f"{name} of {what} is {other}, not {this}"
        a, b = a.detach(), b.detach()
        if not _same(a, b) and not (c is not None and _as_near(a, b, c.detach())):
            return f"{what} is\n{b}\nnot\n{a}"
    return _gradients_differ(plain, fused)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _as_near(plain: torch.Tensor, fused: torch.Tensor, exact: torch.Tensor) -> bool:
    if not plain.is_floating_point():
        return False
    plain, fused, exact, rounding = plain.double(), fused.double(), exact.double(), torch.finfo(plain.dtype).eps
    scale = exact.abs().nan_to_num(0, 0, 0).max() if exact.numel() else exact.sum()
    near = (fused - exact).abs() <= 1.05 * (plain - exact).abs() + 4 * rounding * scale
    return bool((near | (fused == plain) | ~exact.isfinite() | ~plain.isfinite()).all())


def _gradients_differ(plain: Outcome, fused: Outcome) -> str | None:
    if plain.backward_error is not None:  # fusing may make legal what was not
        return None
    if fused.backward_error is not None:
        return f"the backward raises {fused.backward_error}"
    for i, (a, b) in enumerate(zip(plain.gradients, fused.gradients, strict=True)):
        if a is None or b is None:
            if a is not b:
                return f"gradient {i} is {b}, not {a}"
            continue
        finite = a.isfinite() & b.isfinite()
        largest = a[finite].abs().max() if finite.any() else 0
        same = (a == b) | (a.isnan() & b.isnan()) | (finite & ((a - b).abs() <= _SUMS[a.dtype] * largest))
        if not same.all():
            return f"gradient {i} is\n{b}\nnot\n{a}"
    return None


class Subject:
    """A program captured and run as it is, to which its fused forms are held. Raises where it cannot be either."""

    def __init__(self, program: Program, capture: str) -> None:
        self.program, module = program, program.module()
        eager = outcome(module, module, program)
        if eager.error is not None:  # before a compiler prints why
            raise RuntimeError(eager.error)
        self.captured = CAPTURES[capture](program)
        self.plain = outcome(*self.captured.of(self.captured.models), program)
        if self.plain.error is not None:
            raise RuntimeError(self.plain.error)

    @cached_property
    def exact(self) -> Outcome | None:
        """The same in float64."""
        module = self.program.wide.module()
        found = outcome(module, module, self.program.wide)
        return found if found.error is None and len(found.results) == len(self.plain.results) else None

    def fused(self) -> list[FuseResult]:
        return [relu2ir.fuse(model) for model in self.captured.models]

    def difference(self, results: list[FuseResult]) -> str | None:
        """What the fused models do that the program does not, or how they save nothing."""
        fused = outcome(*self.captured.of([result.module for result in results]), self.program)
        sites = [site for result in results for site in result.sites]
        exact = None if all(site.exact for site in sites) else self.exact
        # Where no shapes are known a commuted product may get the strides of the other operand.
        strides = all(len(site.spec.inputs) == 1 or site.tensors is not None for site in sites)
        return difference(self.plain, fused, exact, strides) or self.not_saved(results)

    def not_saved(self, results: list[FuseResult]) -> str | None:
        """An op stands for two steps at least: a graph is shorter by its sites or more."""
        for model, result in zip(self.captured.models, results):
            if isinstance(model, fx.GraphModule):
                before, after = len(model.graph.nodes), len(result.module.graph.nodes)
                if before - after < len(result.sites):
                    return f"has {after} nodes instead of {before} by {len(result.sites)} sites"
        return None


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of what a random program does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def subject(program: Program, capture: str) -> Subject | None:
    """None where ``program`` cannot run or cannot be captured."""
    try:
        return Subject(program, capture)
    except Exception:  # whatever a random program, or what captures it, raises
        return None
