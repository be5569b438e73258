"""The transform matrix: every op, by every provider, through every transform, against its plain expression."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from matrix_table import TRANSFORM
from torch import Tensor
from transforms import SKIPPED, TRANSFORMS, Op

import relu2ir
from relu2ir import binaries, library, registry, specfile, testing
from relu2ir.counting import kernel_calls
from relu2ir.layout import whole_shape
from relu2ir.spec import Layout

OPS = [spec.qualname for spec in specfile.read(binaries.shipped("ops.yaml")).ops]
# The first op of each kind of operands, for what takes seconds.
KINDS = {tuple(input.layout for input in library.find(op).inputs): op for op in reversed(OPS)}
PLATFORM = {"cuda": "cuda", "triton": "cuda", "cpp": "cpu", "native": "cpu"}
SEED = 7

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning"),  # of func.linearize
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]


def operands(op: str, device: torch.device) -> list[Tensor]:
    """Rows of float64 around 0, none of them at a turning point."""
    generator = torch.Generator().manual_seed(SEED)
    shapes = [whole_shape(input.layout, (3, 4)) for input in library.find(op).inputs]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device) * 2 for shape in shapes]


def marks(name: str, provider: str, op: str) -> list[pytest.MarkDecorator]:
    transform = TRANSFORMS[name]
    # A compiler takes a second for each: beside native's an asked-for provider's of one op of each kind will do.
    long = transform.slow or (transform.compiles and provider != "native")
    return [pytest.mark.slow] if long and op not in KINDS.values() else []


CELLS = [
    pytest.param(name, provider, op, id=f"{name}-{provider}-{op.partition('::')[2]}", marks=marks(name, provider, op))
    for name in TRANSFORMS
    for provider in registry.PROVIDERS
    for op in OPS
]


@pytest.mark.parametrize(("name", "provider", "op"), CELLS)
def test_an_op_goes_through_every_transform(
    name: str, provider: str, op: str, required: frozenset[str], record_property
) -> None:
    record_property(TRANSFORM, [name, provider, op])
    reason = SKIPPED.get((name, op)) or SKIPPED.get((name, "*"))
    if reason is not None:
        pytest.skip(reason)
    device = testing.device_of(PLATFORM[provider])
    missing = registry.PROVIDERS[provider].missing() or ("" if device else "no such device here")
    if missing and provider in required:
        pytest.fail(f"--require {provider}: {missing}", pytrace=False)
    if missing or device is None:
        pytest.skip(missing)
    transform, function = TRANSFORMS[name], library.function(op)
    # Where only plain PyTorch can run, the list allows it; where a kernel can, it must.
    asked = f"{provider},native"

    def ours(*tensors: Tensor) -> Tensor:
        return function(*tensors, provider=asked)

    plain = registry.PROVIDERS["native"].lower(library.find(op))
    params = list(library.find(op).params.values())
    expected = transform.run(lambda *tensors: plain(*tensors, *params), operands(op, device))
    with kernel_calls() as calls:
        found = transform.run(ours, operands(op, device))
    compare(found, expected)
    if provider != "native":
        assert (calls[provider] > 0) == transform.kernels, calls


def compare(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert one.dtype == other.dtype
        exact = one.dtype == torch.float64
        # torch's own formulas of gelu and its gradients cancel: 1e-12 of the terms, more of the sum.
        torch.testing.assert_close(one, other, rtol=1e-9 if exact else 0.02, atol=1e-10 if exact else 0.02)


def test_every_kind_of_operand_goes_through() -> None:
    layouts = {input.layout for op in OPS for input in library.find(op).inputs}
    assert layouts == set(Layout)


def test_the_matrix_sees_an_op_whose_gradient_is_wrong() -> None:
    """The comparison itself: of every transform that differentiates, with a gradient that is 1 % off."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return torch.square(torch.relu(x))

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:
            return 2.02 * ctx.saved_tensors[0].relu() * grad

    right: Op = relu2ir.ops.relu_squared
    for name in ("backward", "double backward", "checkpoint", "anomaly mode"):
        x = operands("relu_squared", torch.device("cpu"))
        with pytest.raises(AssertionError):
            compare(TRANSFORMS[name].run(Wrong.apply, x), TRANSFORMS[name].run(right, x))
