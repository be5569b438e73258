"""Running a call: the eager path of every op, and the op of each provider that a graph can hold.

`run` is the whole rule. What it chose is kept in the op's table by (overrides, dtype, device), so a repeated call costs
the guards, one look-up and the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from relu2ir.errors import ProviderError
from relu2ir.guards import not_plain
from relu2ir.layout import kernel_shape_problem, logical_shape
from relu2ir.overrides import active
from relu2ir.providers.compiled import MAX_DIMS
from relu2ir.registry import Imagined, Provider, choose, explain, provider, refusal, requested
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


def run(spec: OpSpec, tensors: Sequence[torch.Tensor], params: Sequence[float], providers: str | None = None) -> Any:
    """Run ``spec``, by the rule of the registry where a kernel may run and in plain PyTorch elsewhere.

    An explicit request (per call, ``use()``, environment) is strict: also where only plain PyTorch may run, unless its
    list has ``native``. While a graph is traced it emits the op of the provider instead.
    """
    why = not_plain(tensors)
    if why is None:
        choice = _choice(spec, tensors, providers)
        needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        return (choice.recorded if needs_gradient else choice.kernel)(*tensors, *params)
    names, _ = requested(spec, providers)
    if names is not None:
        if why.traced:
            return run_traced(spec, choose(spec, *tensors, providers=providers), tensors, params)
        if "native" not in names:
            explanation = explain(spec, *tensors, providers=providers)
            raise ProviderError(refusal(explanation, f"only native can run: {why.reason}"))
    return provider("native", "").lower(spec)(*tensors, *params)


def run_with(
    spec: OpSpec, name: str, strict: bool, tensors: Sequence[torch.Tensor], params: Sequence[float]
) -> torch.Tensor:
    """Run ``spec`` with one provider: the body of the op that a lowered graph holds.

    Where it cannot run, ``strict`` raises ProviderError; otherwise PyTorch does.
    """
    why = not_plain(tensors)
    if why is not None and why.traced:
        return run_traced(spec, provider(name, ""), tensors, params)
    return run(spec, tensors, params, providers=name if strict else f"{name},native")


def run_traced(spec: OpSpec, chosen: Provider, tensors: Sequence[torch.Tensor], params: Sequence[float]) -> Any:
    """Leave the provider's opaque op in the graph being traced, differentiable where a gradient can flow."""
    if chosen.plain:
        return chosen.lower(spec)(*tensors, *params)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _function(spec, opaque(spec, chosen), opaque(spec.backward, chosen))(*tensors, *params)
    return opaque(spec, chosen)(*tensors, *params)


def opaque(spec: OpSpec, chosen: Provider) -> Kernel:
    """The provider's kernel as a torch op, ``relu2ir_cuda::relu_squared.kernel``: no gradient, opaque."""
    chosen.lower(spec)  # registers it
    return getattr(getattr(torch.ops, f"{spec.namespace}_{chosen.name}"), spec.name).kernel


def _choice(spec: OpSpec, tensors: Sequence[torch.Tensor], providers: str | None) -> Choice:
    first = tensors[0]
    # Operands that differ from the first are rare: they are decided anew, and mostly fall to native, which promotes.
    # So are ranks that a kernel may refuse: a choice is kept by dtype and device alone.
    if not _alike(spec, tensors) or first.dim() > MAX_DIMS:
        return _chosen(spec, choose(spec, *tensors, providers=providers), tensors)
    # A lowered graph asks at each call: decided anew that took 300 us.
    asked = active() if providers is None else (active(), providers)
    key, choices = (asked, first.dtype, first.device), table(spec)
    if key not in choices:
        if len(choices) >= MOST_CHOICES:  # a use() with ever new words
            forget()
        choices[key] = _chosen(spec, choose(spec, *tensors, providers=providers), tensors)
    return choices[key]


def _alike(spec: OpSpec, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one choice serves: one dtype and device, one logical shape. Those that broadcast fit by the contract."""
    first = tensors[0]
    if any(tensor.dtype != first.dtype or tensor.device != first.device for tensor in tensors):
        return False
    return len(tensors) == 1 or kernel_shape_problem(spec, [tensor.shape for tensor in tensors]) is None


def _chosen(spec: OpSpec, chosen: Provider, tensors: Sequence[torch.Tensor]) -> Choice:
    kernel = chosen.lower(spec)
    if chosen.plain:
        return Choice(kernel, kernel)
    # The backward runs what the forward chose, later and on another thread; only a refusal of its own sends it on.
    shape = logical_shape(spec.inputs[0].layout, tensors[0].shape) or ()
    grad = Imagined(shape, tensors[0].dtype, tensors[0].device)
    refused = chosen.refuses(spec.backward, [grad, *tensors]) is not None
    backward = provider("native", "") if refused else chosen
    return Choice(kernel, _function(spec, kernel, backward.lower(spec.backward)))


@cache
def _function(spec: OpSpec, forward: Kernel, backward: Kernel) -> Kernel:
    """``forward`` with its gradient: saves the inputs; ``backward`` runs unless it must itself be differentiable."""
    count, plain = len(spec.inputs), provider("native", "").lower(spec.backward)
    indices, broadcasts = spec.gradient_outputs, [input.layout.broadcast for input in spec.inputs]

    # Without setup_context: 2.9 to 7 us a call against 19 to 26.
    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            ctx.save_for_backward(*args[:count])
            if spec.params:
                ctx.params = args[count:]
            return forward(*args)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            tensors, params = ctx.saved_tensors, ctx.params if spec.params else ()
            why = not_plain((grad, *tensors))
            # create_graph (the second derivative), vmapped gradients: plain PyTorch.
            fused = not torch.is_grad_enabled() and (why is None or why.traced)
            grads = (backward if fused else plain)(grad, *tensors, *params)
            grads = grads if isinstance(grads, tuple | list) else (grads,)
            # A broadcast input's gradient is summed to its shape, in float32 for half types, as torch.sum does.
            of_inputs = [
                None if not needed else grads[index].sum_to_size(tensor.shape) if broadcast else grads[index]
                for index, tensor, broadcast, needed in zip(indices, tensors, broadcasts, ctx.needs_input_grad)
            ]
            return (*of_inputs, *(None for _ in params))

    Recorded.__name__ = Recorded.__qualname__ = f"{spec.name}_recorded"
    # The C-level apply: 5.1 us against 6.9. The Python one adds the functorch case, which `not_plain` has ruled out.
    return super(torch.autograd.Function, Recorded).apply
