"""Running a call: the eager path of every op, and the op of each provider that a graph can hold.

`run` is the whole rule. What it chose is kept in the op's table by (overrides, dtype, device), so a repeated call costs
the guards, one look-up and the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from relu2ir.errors import ProviderError, SaveError
from relu2ir.fastguard import is_plain
from relu2ir.guards import NotPlain, not_plain
from relu2ir.inplace import check_writable, writing
from relu2ir.layout import kernel_shape_problem, logical_shape
from relu2ir.overrides import active
from relu2ir.providers.compiled import MAX_DIMS
from relu2ir.registry import Imagined, Provider, choose, explain, provider, refusal, requested
from relu2ir.saving import requested as asked_to_save
from relu2ir.saving import saved
from relu2ir.spec import OpSpec

Kernel = Callable[..., Any]


class Choice(NamedTuple):
    """The chosen provider's two callables: without and with a gradient to record."""

    kernel: Kernel
    recorded: Kernel


MOST_CHOICES = 1000

# One table per op, cleared when providers or overrides of the process change.
_tables: dict[OpSpec, dict[Any, Choice]] = {}
# Called by `forget`: the fronts remember choices of their own.
on_forget: list[Callable[[], Any]] = []


def table(spec: OpSpec) -> dict[Any, Choice]:
    """The choices made so far for ``spec``: {(overrides, dtype, device): Choice}; with a call's request beside them."""
    return _tables.setdefault(spec, {})


def forget() -> None:
    """Drop every choice: providers, rows or the environment changed."""
    for choices in _tables.values():
        choices.clear()
    for also in on_forget:
        also()


def run(
    spec: OpSpec,
    tensors: Sequence[torch.Tensor],
    params: Sequence[float],
    providers: str | None = None,
    save: str | None = None,
) -> Any:
    """Run ``spec``, by the rule of the registry where a kernel may run and in plain PyTorch elsewhere.

    An explicit request (per call, ``use()``, environment) is strict: also where only plain PyTorch may run, unless its
    list has ``native``. While a graph is traced it emits the op of the provider instead. ``save`` is what to keep for
    the backward, as in `saved`.
    """
    why = not_plain(tensors)
    if why is None:
        if spec.writes_input:
            check_writable(tensors[0])
        choice = _choice(spec, tensors, providers, save)
        return (choice.recorded if _records(tensors) else choice.kernel)(*tensors, *params)
    chosen, (names, _) = provider("native", ""), requested(spec, providers)
    if names is not None:
        if why.traced:
            chosen = choose(spec, *tensors, providers=providers)
        elif "native" not in names:
            explanation = explain(spec, *tensors, providers=providers)
            raise ProviderError(refusal(explanation, f"only native can run: {why.reason}"))
    return _run_elsewhere(spec, chosen, why, tensors, params, save)


def run_with(
    spec: OpSpec,
    name: str,
    strict: bool,
    tensors: Sequence[torch.Tensor],
    params: Sequence[float],
    save: str | None = None,
) -> Any:
    """Run ``spec`` with one provider: the body of the op that a lowered graph holds.

    Where it cannot run, ``strict`` raises ProviderError; otherwise PyTorch does.
    """
    why = not_plain(tensors)
    if why is not None and why.traced:
        return _run_elsewhere(spec, provider(name, ""), why, tensors, params, save)
    return run(spec, tensors, params, name if strict else f"{name},native", save)


def _run_elsewhere(
    spec: OpSpec,
    chosen: Provider,
    why: NotPlain,
    tensors: Sequence[torch.Tensor],
    params: Sequence[float],
    save: str | None,
) -> Any:
    """Run where kernels may not: in plain PyTorch, or in a trace by the provider's opaque op, differentiably."""
    if spec.writes_input and spec.forward is not None:
        # Of a copy: what autograd keeps of the input must not be what is written. A compiler drops it.
        result = _run_elsewhere(spec.forward, chosen, why, [tensors[0].clone()], params, save)
        return tensors[0].copy_(result)
    if not _records(tensors):
        return _callable(spec, chosen)(*tensors, *params)
    # A preference for the result is for eager memory: a compiler decides by itself what to keep.
    keeps_inputs = f"{why.reason}, which only plain PyTorch can serve" if why.transforms else None
    asked, _ = asked_to_save(spec, save)
    what = saved(spec, tensors[0].dtype, save, keeps_inputs) if asked else "input"
    return _recorded(spec, partial(_callable, chosen=chosen), chosen.plain, what)(*tensors, *params)


def _records(tensors: Sequence[torch.Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _callable(spec: OpSpec, chosen: Provider) -> Kernel:
    """What a graph calls of a provider."""
    return chosen.lower(spec) if chosen.plain else opaque(spec, chosen)


def opaque(spec: OpSpec, chosen: Provider) -> Kernel:
    """The provider's kernel as a torch op, ``relu2ir_cuda::relu_squared.kernel``: no gradient, opaque."""
    chosen.lower(spec)  # registers it
    return getattr(getattr(torch.ops, f"{spec.namespace}_{chosen.name}"), spec.name).kernel


def _choice(spec: OpSpec, tensors: Sequence[torch.Tensor], providers: str | None, save: str | None) -> Choice:
    first = tensors[0]
    # Operands that differ from the first are rare: they are decided anew, and mostly fall to native, which promotes.
    # So are ranks that a kernel may refuse: a choice is kept by dtype and device alone.
    if not _alike(spec, tensors) or first.dim() > MAX_DIMS:
        return _chosen(spec, choose(spec, *tensors, providers=providers), tensors, save)
    # A lowered graph asks at each call: decided anew that took 300 us.
    asked = active() if providers is None and save is None else (active(), providers, save)
    key, choices = (asked, first.dtype, first.device), table(spec)
    if key not in choices:
        if len(choices) >= MOST_CHOICES:  # a use() with ever new words
            forget()
        choices[key] = _chosen(spec, choose(spec, *tensors, providers=providers), tensors, save)
    return choices[key]


def _alike(spec: OpSpec, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one choice serves: one dtype and device, one logical shape. Those that broadcast fit by the contract."""
    first = tensors[0]
    if any(tensor.dtype != first.dtype or tensor.device != first.device for tensor in tensors):
        return False
    return len(tensors) == 1 or kernel_shape_problem(spec, [tensor.shape for tensor in tensors]) is None


def _chosen(spec: OpSpec, chosen: Provider, tensors: Sequence[torch.Tensor], save: str | None) -> Choice:
    kernel = chosen.lower(spec)
    if spec.writes_input and not chosen.plain:
        kernel = writing(kernel)
    try:
        what = saved(spec, tensors[0].dtype, save)
    except SaveError as error:  # of a call that records only
        return Choice(kernel, _raising(error))
    # The backward runs what the forward chose, later and on another thread; only a refusal of its own sends it on.
    shape = logical_shape(spec.inputs[0].layout, tensors[0].shape) or ()
    grad = Imagined(shape, tensors[0].dtype, tensors[0].device)
    refused = chosen.refuses(spec.backward, [grad, *tensors]) is not None if what == "input" else False

    def lowered(op: OpSpec) -> Kernel:
        return kernel if op is spec else (provider("native", "") if refused else chosen).lower(op)

    return Choice(kernel, _recorded(spec, lowered, chosen.plain, what))


def _raising(error: SaveError) -> Kernel:
    def refuse(*args: Any) -> Any:
        raise SaveError(*error.args)

    return refuse


def _recorded(spec: OpSpec, lowered: Callable[[OpSpec], Kernel], plain: bool, what: str) -> Kernel:
    """``spec`` with its gradient, each op by ``lowered``, keeping ``what`` for it. Plain PyTorch records by itself."""
    if what == "input" and plain:
        return lowered(spec)
    return _function(spec, what, lowered(spec), lowered(_gradient(spec, what)))


def _gradient(spec: OpSpec, what: str) -> OpSpec:
    """The gradient op that reads what is kept."""
    declared = spec.forward or spec
    found = declared.backward if what == "input" else declared.backward_from_output
    assert found is not None, "what is kept was asked of the spec"
    return found


@cache
def _function(spec: OpSpec, what: str, forward: Kernel, backward: Kernel) -> Kernel:
    """``forward`` with its gradient: keeps ``what`` for ``backward``, unless that must itself be differentiable."""
    gradient, keeps_inputs, plain = _gradient(spec, what), what == "input", is_plain()
    count, differentiable = len(spec.inputs), provider("native", "").lower(gradient.differentiable)
    indices, broadcasts = gradient.gradient_outputs, [input.layout.broadcast for input in spec.inputs]
    one_each, takes_params, no_gradients = not any(broadcasts), bool(spec.params), (None,) * len(spec.params)

    # Without setup_context: 2.9 to 7 us a call against 19 to 26.
    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            if takes_params:
                ctx.params = args[count:]
            if keeps_inputs:
                ctx.save_for_backward(*args[:count])
                return forward(*args)
            if not one_each:
                ctx.shapes = [tensor.shape for tensor in args[:count]]
            result = forward(*args)
            if spec.writes_input:
                ctx.mark_dirty(result)
            ctx.save_for_backward(result)
            return result

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            tensors, params = ctx.saved_tensors, ctx.params if takes_params else ()
            # create_graph (the second derivative), vmapped gradients: plain PyTorch.
            fused = not torch.is_grad_enabled() and (plain(grad, *tensors) or _is_traced((grad, *tensors)))
            grads = (backward if fused else differentiable)(grad, *tensors, *params)
            grads = grads if isinstance(grads, tuple | list) else (grads,)
            if one_each:
                return (*grads, *no_gradients)
            # A broadcast input's gradient is summed to its shape, in float32 for half types, as torch.sum does.
            shapes = [tensor.shape for tensor in tensors] if keeps_inputs else ctx.shapes
            of_inputs = [
                None if not needed else grads[index].sum_to_size(shape) if broadcast else grads[index]
                for index, shape, broadcast, needed in zip(indices, shapes, broadcasts, ctx.needs_input_grad)
            ]
            return (*of_inputs, *no_gradients)

    Recorded.__name__ = Recorded.__qualname__ = f"{spec.name}_recorded"
    # The C-level apply: 5.1 us against 6.9. The Python one adds the functorch case, which `not_plain` has ruled out.
    return super(torch.autograd.Function, Recorded).apply


def _is_traced(tensors: Sequence[torch.Tensor]) -> bool:
    why = not_plain(tensors)
    return why is not None and why.traced
