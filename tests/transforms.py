"""Every transform of PyTorch that an op must go through: each one a way to call a function of tensors.

The same way is taken by the op and by its plain expression, and must give the same. ``kernels`` says whether the
provider's kernel is reached on the way: a transform that looks into an op must find plain PyTorch there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from two_tensor import TwoTensor

Op = Callable[..., Tensor]
Results = Sequence[Tensor]


@dataclass(frozen=True)
class Transform:
    """``run(op, tensors)``; ``batched`` tells the dimension over which each tensor is mapped, None for none."""

    name: str
    run: Callable[[Op, list[Tensor]], Results]
    kernels: bool
    slow: bool = False  # it compiles for seconds

    @property
    def compiles(self) -> bool:
        return self.name.startswith(("compile", "export"))


TRANSFORMS: dict[str, Transform] = {}


def transform(name: str, kernels: bool, slow: bool = False) -> Callable[[Any], Any]:
    def add(run: Callable[[Op, list[Tensor]], Results]) -> Any:
        TRANSFORMS[name] = Transform(name, run, kernels, slow)
        return run

    return add


def leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def weights(like: Tensor) -> Tensor:
    """What arrives as a gradient: no two elements alike."""
    return torch.linspace(-1.0, 2.0, like.numel(), dtype=like.dtype, device=like.device).reshape(like.shape)


def total(op: Op) -> Callable[..., Tensor]:
    return lambda *tensors: (op(*tensors) * weights(op(*tensors))).sum()


def everything(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(range(len(tensors)))


# ** 1 -- plain autograd and its modes **


@transform("no_grad", kernels=True)
def _(op: Op, tensors: list[Tensor]) -> Results:
    with torch.no_grad():
        return [op(*leaves(tensors))]


@transform("inference_mode", kernels=True)
def _(op: Op, tensors: list[Tensor]) -> Results:
    with torch.inference_mode():
        return [op(*tensors).clone()]


@transform("backward", kernels=True)
def _(op: Op, tensors: list[Tensor]) -> Results:
    given = leaves(tensors)
    out = op(*given)
    return torch.autograd.grad(out, given, weights(out))


@transform("backward of one input", kernels=True)
def _(op: Op, tensors: list[Tensor]) -> Results:
    given = leaves(tensors)
    for other in given[:-1]:
        other.requires_grad_(False)
    out = op(*given)
    return torch.autograd.grad(out, given[-1:], weights(out))


@transform("double backward", kernels=True)
def _(op: Op, tensors: list[Tensor]) -> Results:
    given = leaves(tensors)
    out = op(*given)
    first = torch.autograd.grad(out, given, weights(out), create_graph=True)
    return [*first, *torch.autograd.grad(sum((each * each).sum() for each in first), given, materialize_grads=True)]


@transform("third derivative", kernels=True)
def _(op: Op, tensors: list[Tensor]) -> Results:
    given = leaves(tensors)
    value = total(op)(*given)
    for _ in range(2):
        grads = torch.autograd.grad(value, given, create_graph=True, materialize_grads=True)
        value = sum((grad * grad).sum() for grad in grads) + 0 * sum(each.sum() for each in given)
    return torch.autograd.grad(value, given, materialize_grads=True)


@transform("batched gradients", kernels=True)
def _(op: Op, tensors: list[Tensor]) -> Results:
    given = leaves(tensors)
    out = op(*given)
    arriving = torch.stack([weights(out), 2 * weights(out) + 1])
    return torch.autograd.grad(out, given, arriving, is_grads_batched=True)


@transform("anomaly mode", kernels=True)
def _(op: Op, tensors: list[Tensor]) -> Results:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Anomaly Detection has been enabled")
        with torch.autograd.detect_anomaly():
            return TRANSFORMS["backward"].run(op, tensors)


@transform("checkpoint, reentrant", kernels=True)
def _(op: Op, tensors: list[Tensor]) -> Results:
    given = leaves(tensors)
    out = checkpoint(op, *given, use_reentrant=True)
    out.backward(weights(out))  # it serves no torch.autograd.grad
    return [each.grad for each in given]


@transform("checkpoint", kernels=True)
def _(op: Op, tensors: list[Tensor]) -> Results:
    return TRANSFORMS["backward"].run(lambda *each: checkpoint(op, *each, use_reentrant=False), tensors)


@transform("saved tensors on the CPU", kernels=True)
def _(op: Op, tensors: list[Tensor]) -> Results:
    with torch.autograd.graph.save_on_cpu():
        return TRANSFORMS["backward"].run(op, tensors)


# ** 2 -- torch.func and forward mode **


@transform("forward-mode AD", kernels=False)
def _(op: Op, tensors: list[Tensor]) -> Results:
    with forward_ad.dual_level():
        dual = op(*(forward_ad.make_dual(each, weights(each)) for each in tensors))
        return tuple(forward_ad.unpack_dual(dual))


@transform("func.grad", kernels=False)
def _(op: Op, tensors: list[Tensor]) -> Results:
    return torch.func.grad(total(op), everything(tensors))(*tensors)


@transform("func.vjp", kernels=False)
def _(op: Op, tensors: list[Tensor]) -> Results:
    out, pull = torch.func.vjp(op, *tensors)
    return [out, *pull(weights(out))]


@transform("func.jvp", kernels=False)
def _(op: Op, tensors: list[Tensor]) -> Results:
    return torch.func.jvp(op, tuple(tensors), tuple(map(weights, tensors)))


@transform("func.linearize", kernels=True)  # the values; the tangents in plain PyTorch
def _(op: Op, tensors: list[Tensor]) -> Results:
    out, push = torch.func.linearize(op, *tensors)
    return [out, push(*map(weights, tensors))]


@transform("func.jacrev", kernels=False)
def _(op: Op, tensors: list[Tensor]) -> Results:
    return torch.func.jacrev(op, everything(tensors))(*tensors)


@transform("func.jacfwd", kernels=False)
def _(op: Op, tensors: list[Tensor]) -> Results:
    return torch.func.jacfwd(op, everything(tensors))(*tensors)


@transform("func.hessian", kernels=False)
def _(op: Op, tensors: list[Tensor]) -> Results:
    rows = torch.func.hessian(total(op), everything(tensors))(*tensors)
    return [block for row in rows for block in row]


def in_dims(tensors: Sequence[Tensor]) -> tuple[int | None, ...]:
    """Rows are mapped over; what broadcasts, which has at most one dimension, is not."""
    return tuple(0 if tensor.dim() == 2 else None for tensor in tensors)


@transform("vmap", kernels=False)
def _(op: Op, tensors: list[Tensor]) -> Results:
    return [torch.vmap(op, in_dims(tensors))(*tensors)]


@transform("vmap within vmap", kernels=False)
def _(op: Op, tensors: list[Tensor]) -> Results:
    stacked = [torch.stack([each, each * 2]) if each.dim() == 2 else each for each in tensors]
    return [torch.vmap(torch.vmap(op, in_dims(tensors)), in_dims(tensors), out_dims=0)(*stacked)]


@transform("gradients per sample", kernels=False)
def _(op: Op, tensors: list[Tensor]) -> Results:
    return torch.vmap(torch.func.grad(total(op), everything(tensors)), in_dims(tensors))(*tensors)


@transform("func.functionalize", kernels=False)
def _(op: Op, tensors: list[Tensor]) -> Results:
    return [torch.func.functionalize(op)(*tensors)]


# ** 3 -- types and modes **


@transform("autocast", kernels=False)
def _(op: Op, tensors: list[Tensor]) -> Results:
    """Half operands as well, whose type some functions widen."""
    given, half = leaves(tensors), leaves([each.bfloat16() for each in tensors])
    with torch.autocast(tensors[0].device.type, torch.bfloat16):
        outs = [op(*given), op(*half)]
    return [*outs, *torch.autograd.grad(outs[0], given, weights(outs[0]))]


@transform("a tensor subclass", kernels=False)
def _(op: Op, tensors: list[Tensor]) -> Results:
    out = op(*(TwoTensor(each, each.flip(-1) if each.dim() else each) for each in tensors))
    assert isinstance(out, TwoTensor)
    return [out.a, out.b]


@transform("make_fx", kernels=False)
def _(op: Op, tensors: list[Tensor]) -> Results:
    traced = make_fx(lambda *each: torch.autograd.grad(total(op)(*each), each))(*leaves(tensors))
    assert "relu2ir" not in traced.code, "it sees plain PyTorch"
    return traced(*tensors)


@transform("a meta tensor", kernels=False)
def _(op: Op, tensors: list[Tensor]) -> Results:
    out = op(*(each.to("meta") for each in tensors))
    return [torch.zeros(out.shape, dtype=out.dtype), torch.tensor(out.stride())]


# ** 4 -- compilers **


def compiled(backend: str, **how: Any) -> Callable[[Op, list[Tensor]], Results]:
    def run(op: Op, tensors: list[Tensor]) -> Results:
        torch._dynamo.reset()
        return TRANSFORMS["backward"].run(torch.compile(op, backend=backend, fullgraph=True, **how), tensors)

    return run


transform("compile, aot_eager", kernels=False)(compiled("aot_eager"))
transform("compile, inductor", kernels=False, slow=True)(compiled("inductor"))


@transform("compile, dynamic shapes", kernels=False)
def _(op: Op, tensors: list[Tensor]) -> Results:
    torch._dynamo.reset()
    call = torch.compile(op, backend="aot_eager", fullgraph=True, dynamic=True)
    longer = [torch.cat([each, each]) if each.dim() == 2 else each for each in tensors]
    return [*TRANSFORMS["backward"].run(call, tensors), *TRANSFORMS["backward"].run(call, longer)]


@transform("compile of func.grad", kernels=False)
def _(op: Op, tensors: list[Tensor]) -> Results:
    torch._dynamo.reset()
    grad = torch.func.grad(total(op), everything(tensors))
    return torch.compile(grad, backend="aot_eager", fullgraph=True)(*tensors)


@transform("compile of func.jvp", kernels=False)
def _(op: Op, tensors: list[Tensor]) -> Results:
    torch._dynamo.reset()

    def push(*each: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.jvp(op, each, tuple(map(weights, each)))

    return torch.compile(push, backend="aot_eager", fullgraph=True)(*tensors)


@transform("compile of vmap", kernels=False)
def _(op: Op, tensors: list[Tensor]) -> Results:
    torch._dynamo.reset()
    return [torch.compile(torch.vmap(op, in_dims(tensors)), backend="aot_eager", fullgraph=True)(*tensors)]


@transform("export", kernels=False)
def _(op: Op, tensors: list[Tensor]) -> Results:
    class Model(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            return op(*tensors)

    program = torch.export.export(Model(), tuple(tensors)).run_decompositions()
    assert "relu2ir" not in str(program.graph)
    return [program.module()(*tensors)]


# What is skipped, and why; (transform, op) with "*" for each.
SKIPPED: dict[tuple[str, str], str] = {}
