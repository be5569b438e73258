"""The backend matrix: any provider held to any op, over dtypes, memory arrangements and special values.

For an op of one's own, in one's own test suite:

    import pytest, relu2ir; relu2ir.load("my_ops.yaml")
    @pytest.mark.parametrize("cell", relu2ir.testing.cells(ops=["mine::gated"]), ids=str)
    def test_gated(cell): cell.check()

For a provider of one's own, which an entry point of the group ``relu2ir.providers`` names:

    import pytest, relu2ir
    @pytest.mark.parametrize("cell", relu2ir.testing.cells(providers=["mine"]), ids=str)
    def test_provider(cell): cell.check()
"""

from __future__ import annotations

import unittest
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch._subclasses import FakeTensorMode

from relu2ir import library, registry
from relu2ir.eager import opaque
from relu2ir.operands import MANY, inputs
from relu2ir.oracle import mismatches
from relu2ir.platforms import DEVICE_TYPE, PLATFORMS, built_for_rocm
from relu2ir.saving import output_problem
from relu2ir.spec import OpSpec

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# The gradient from what was saved: the inputs, or the result of an op that declares one by that.
FORWARD, GRADIENT, FROM_OUTPUT = DIRECTIONS = ("forward", "gradient", "gradient from output")


def device_of(platform: str) -> torch.device | None:
    """A device of ``platform`` on this machine, or None."""
    kind = DEVICE_TYPE[platform]
    if kind == "cuda" and (not torch.cuda.is_available() or built_for_rocm() != (platform == "rocm")):
        return None
    return None if kind == "xpu" and not torch.xpu.is_available() else torch.device(kind)


@dataclass(frozen=True)
class Cell:
    """One provider on one platform, one op, one dtype, one direction.

    Its largest inputs have ``many`` elements; ``brief`` as for `inputs`.
    """

    platform: str
    provider: str
    op: str
    dtype: torch.dtype
    direction: str
    many: int = MANY
    brief: bool = False

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.platform}-{self.provider}-{self.op.replace('::', '.')}-{dtype}-{self.direction}"

    @property
    def spec(self) -> OpSpec:
        """The op whose kernel this cell holds to its meaning."""
        forward = library.find(self.op)
        found = {FORWARD: forward, GRADIENT: forward.backward, FROM_OUTPUT: forward.backward_from_output}[
            self.direction
        ]
        assert found is not None, "cells() makes none for an op without"
        return found

    @property
    def reads(self) -> OpSpec:
        """The op whose inputs the cell is given: the gradient from the result is called by what leads to it."""
        return self.spec if self.direction == FORWARD else library.find(self.op).backward

    @property
    def unsaved(self) -> str | None:
        """Why the op has no gradient from its result in this type, or None."""
        return output_problem(library.find(self.op), self.dtype)

    def unavailable(self) -> str | None:
        """Why this cell cannot run here: no such device, or the provider's own reason; None when it can."""
        device = device_of(self.platform)
        provider = registry.provider(self.provider, "a cell of the matrix")
        if device is None:
            return provider.missing() or f"this machine has no device of platform '{self.platform}'"
        _, tensors = next(inputs(self.reads, self.dtype, device))
        return provider.refuses(self.reads, tensors) or provider.missing()

    def check(self) -> None:
        """Run every arrangement; AssertionError that lists each wrong one. unittest.SkipTest where it cannot run."""
        reason = self.unavailable()
        if reason is not None:
            raise unittest.SkipTest(reason)
        device = device_of(self.platform)
        assert device is not None
        problems = []
        for name, tensors in inputs(self.reads, self.dtype, device, self.many, self.brief):
            problems += [f"{name}: {problem}" for problem in self._problems(tensors)]
        if problems:
            raise AssertionError(f"{self}: {len(problems)} wrong\n  " + "\n  ".join(problems))

    def _problems(self, tensors: list[torch.Tensor]) -> list[str]:
        provider = registry.provider(self.provider, "a cell of the matrix")
        refusal = provider.refuses(self.reads, tensors)
        if refusal is not None:
            return [f"refused: {refusal}"]
        before = [tensor.clone() for tensor in tensors]
        _soil_freed_memory(tensors[0])
        results = self.run(tensors)
        params = list(self.spec.params.values())
        args = [*self._read(before), *params]
        problems = mismatches(self.spec, args, results, self.dtype if provider.plain else None)
        # Plain PyTorch is its own fake; autograd's formulas choose other strides than a derived one.
        strides = [] if provider.plain else self._strides(self._read(tensors))
        for result, stride in zip(results, strides):
            if stride is None or result.numel() == 0:
                continue
            # Of a dimension of size 1 the stride says nothing, and torch's own differ.
            if any(size > 1 and own != told for size, own, told in zip(result.shape, result.stride(), stride)):
                problems.append(f"the result has strides {result.stride()}; a fake tensor has {stride}")
        if any(not torch.equal(_bits(a), _bits(b.clone())) for a, b in zip(before, tensors)):
            problems.append("an input was changed")
        return problems

    def _read(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """What the cell's op reads of its operands: those, or the gradient and the result of the others."""
        if self.direction != FROM_OUTPUT:
            return tensors
        return [tensors[0], library.function(self.op)(*tensors[1:], provider=self.provider)]

    def _strides(self, tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...] | None]:
        """The strides that a compiler is told: the public op's forward, the provider's own backward op's.

        None for a gradient that is summed, by PyTorch, to the shape of an input that broadcasts.
        """
        provider = registry.provider(self.provider, "a cell of the matrix")
        forward = self.spec.forward
        op = library.inner_op(self.spec, "native") if forward is None else opaque(self.spec, provider)
        params = [] if forward is None else list(self.spec.params.values())
        with FakeTensorMode() as mode:
            results = op(*map(mode.from_tensor, tensors), *params)
        strides = [result.stride() for result in (results if isinstance(results, tuple) else (results,))]
        if forward is None:
            return strides
        of_inputs = zip(forward.inputs, self.spec.gradient_outputs)
        return [None if input.layout.broadcast else strides[index] for input, index in of_inputs]

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The cell's op as users call it; the gradient by autograd, which runs the provider's backward kernel."""
        call = library.function(self.op)
        if self.direction == FORWARD:
            return (call(*tensors, provider=self.provider),)
        leaves = [tensor.detach().requires_grad_() for tensor in tensors[1:]]
        save = "output" if self.direction == FROM_OUTPUT else "input"
        return torch.autograd.grad(call(*leaves, provider=self.provider, save=save), leaves, tensors[0])


def _soil_freed_memory(like: torch.Tensor) -> None:
    """Leave a wrong value in the memory that the allocator hands out next, lest an element never written look right."""
    for _ in range(3):
        torch.full(like.shape, 77.0, dtype=like.dtype, device=like.device)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def cells(
    ops: Collection[str] | None = None,
    providers: Collection[str] | None = None,
    platforms: Collection[str] = PLATFORMS,
    many: int = MANY,
) -> list[Cell]:
    """Every cell: platforms x providers x ops x dtypes x directions, of all that is registered unless named."""
    ops = ops if ops is not None else [spec.qualname for spec in library.specs()]
    providers = providers if providers is not None else list(registry.PROVIDERS)
    every = (Cell(*axes, many) for axes in product(platforms, providers, ops, DTYPES, DIRECTIONS))
    return [each for each in every if each.direction != FROM_OUTPUT or not each.unsaved]
