"""What only a GPU shows: streams, CUDA graphs, offsets past 2**32, autocast, a second device, autograd's own thread.

Values, dtypes and memory arrangements are the backend matrix's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import relu2ir
from relu2ir.counting import kernel_calls
from relu2ir.fx.backend import relu2ir_backend

# 55 ms on an H200: far longer than a launch takes, so that work on a wrong stream overtakes.
DELAY = 100_000_000
GB = 10**9


def expected(x: Tensor) -> Tensor:
    return torch.square(torch.relu(x))


def expected_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Of float32 values, where the two products of the gradient round as they do in a kernel."""
    return torch.where(x <= 0, torch.zeros_like(x), grad * (2 * torch.relu(x)))


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.needs(name)) for name in ("cuda", "triton")])
def provider(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each GPU provider, asked for: it runs or the test fails."""
    with relu2ir.use(providers=request.param):
        yield request.param


@pytest.fixture
def room() -> Iterator[Callable[[int], None]]:
    """``room(bytes)`` skips where the GPU has less left; afterwards the memory goes back to it."""

    def check(size: int) -> None:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        if free < size:
            pytest.skip(f"it takes {size / GB:.0f} GB of GPU memory; {free / GB:.0f} are free")

    yield check
    torch.cuda.empty_cache()


def on_rows(check: Callable[..., bool], *tensors: Tensor, rows: int) -> bool:
    """Whether ``check`` holds on every block of ``rows``: the expected values of all at once would not fit."""
    return all(check(*blocks) for blocks in zip(*(tensor.split(rows) for tensor in tensors), strict=True))


# ** streams and graphs **


def test_kernels_run_on_the_current_stream(provider: str) -> None:
    x, grad, late = (torch.randn(3, 70_001, device="cuda") for _ in range(3))
    late.requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # once before the race: what is compiled and allocated at first is so by now
        torch.autograd.grad(relu2ir.ops.relu_squared(late), late, grad)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY)
        with torch.no_grad():
            late.copy_(x)
        result = relu2ir.ops.relu_squared(late)
        (gradient,) = torch.autograd.grad(result, late, grad)
    assert not stream.query(), "the host waited for the device"
    stream.synchronize()
    assert result.equal(expected(x))
    assert gradient.equal(expected_gradient(grad, x))


def test_a_captured_step_replays_on_new_data(provider: str) -> None:
    x, grad = torch.randn(3, 70_001, device="cuda", requires_grad=True), torch.randn(3, 70_001, device="cuda")
    sliced = torch.randn(70, 130, device="cuda")[:, :65]

    def step() -> tuple[Tensor, Tensor, Tensor]:
        result = relu2ir.ops.relu_squared(x)
        (gradient,) = torch.autograd.grad(result, x, grad)
        return result, gradient, relu2ir.ops.relu_squared(sliced)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result, gradient, of_rows = step()
    for _ in range(2):
        with torch.no_grad():
            for tensor in (x, grad, sliced):
                tensor.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert result.equal(expected(x))
        assert gradient.equal(expected_gradient(grad, x))
        assert of_rows.equal(expected(sliced))


# ** sizes **


def test_more_rows_than_a_grid_has_blocks_on_its_short_axes(provider: str) -> None:
    for columns in (64, 65):  # whole vectors, and a tail
        x = torch.randn(200_000, 2 * columns, device="cuda", dtype=torch.bfloat16)[:, :columns]
        assert relu2ir.ops.relu_squared(x).equal(expected(x))


def test_more_elements_than_32_bits_count(provider: str, room: Callable[[int], None]) -> None:
    room(45 * GB)
    count, part = 2**32 + 17, 2**28
    x = torch.empty(count, device="cuda", dtype=torch.bfloat16).normal_().requires_grad_()
    result = relu2ir.ops.relu_squared(x)
    grad = torch.empty_like(result).normal_()
    (gradient,) = torch.autograd.grad(result, x, grad)
    with torch.no_grad():
        assert on_rows(lambda y, x: y.equal(expected(x)), result, x, rows=part)
        assert on_rows(
            lambda g, grad, x: g.equal(expected_gradient(grad.float(), x.float()).bfloat16()),
            *(gradient, grad, x),
            rows=part,
        )
        assert int((x[-17:] > 0).sum()) > 0, "the tail tells nothing"


def test_sliced_rows_of_more_elements_than_31_bits_count(provider: str, room: Callable[[int], None]) -> None:
    room(20 * GB)
    rows, columns = 70_000, 40_001  # 2.8e9 elements, the last 4.2e9 from the first
    x = torch.empty(rows, 60_000, device="cuda", dtype=torch.bfloat16).normal_()[:, :columns]
    result = relu2ir.ops.relu_squared(x)
    assert result.is_contiguous()
    assert on_rows(lambda y, x: y.equal(expected(x)), result, x, rows=10_000)


def test_packed_rows_of_more_elements_than_31_bits_count(provider: str, room: Callable[[int], None]) -> None:
    room(30 * GB)
    x = torch.empty(70_000, 2 * 20_001, device="cuda", dtype=torch.bfloat16).normal_()
    result = relu2ir.ops.silu_and_mul(x)

    def check(result: Tensor, x: Tensor) -> bool:
        gate, up = x.double().chunk(2, -1)
        # Rounded once from float32: half a unit of bfloat16, and what sigmoid may be off by in float32.
        return torch.allclose(result.double(), F.silu(gate) * up, rtol=2**-8, atol=1e-30)

    assert on_rows(check, result, x, rows=2_000)


def test_results_are_deterministic(provider: str) -> None:
    x = torch.randn(4_000, 515, device="cuda", dtype=torch.float16)[:, :514].requires_grad_()
    for op in (relu2ir.ops.relu_squared, relu2ir.ops.silu_and_mul):
        result = op(x)
        (gradient,) = torch.autograd.grad(result, x, torch.ones_like(result))
        for _ in range(10):
            again = op(x)
            assert again.equal(result)
            assert torch.autograd.grad(again, x, torch.ones_like(result))[0].equal(gradient)


# ** devices and threads **


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it takes two GPUs")
def test_a_tensor_of_another_device_is_computed_there(provider: str) -> None:
    x = torch.randn(70_001, device="cuda:1", requires_grad=True)
    result = relu2ir.ops.relu_squared(x)
    (gradient,) = torch.autograd.grad(result, x, torch.ones_like(x))
    assert (result.device, gradient.device) == (x.device, x.device)
    assert result.equal(expected(x))
    assert gradient.equal(expected_gradient(torch.ones_like(x), x))
    assert torch.cuda.current_device() == 0


def test_the_backward_on_autograds_thread_runs_what_the_forward_chose(provider: str) -> None:
    threads: list[int] = []
    x = torch.randn(1_000, device="cuda", requires_grad=True)
    with kernel_calls() as calls:
        result = relu2ir.ops.relu_squared(x)
        result.register_hook(lambda grad: threads.append(threading.get_ident()))
        with relu2ir.use(providers="native"):
            torch.autograd.grad(result, x, torch.ones_like(x))
    assert threads and threads[0] != threading.get_ident()
    assert calls == {provider: 2}


@pytest.mark.needs("cuda")
@pytest.mark.needs("triton")
def test_the_providers_agree_to_the_bit_where_an_op_is_exact() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        x = torch.randn(100_003, device="cuda", dtype=dtype)
        results = [relu2ir.ops.relu_squared(x, provider=name) for name in ("cuda", "triton", "native")]
        assert results[0].equal(results[1]) and results[0].equal(results[2])


# ** autocast: a square gives float32, a product stays bfloat16, and fusing changes neither **


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.square(F.relu(x))


class Power(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x) ** 2


class Product(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        r = F.relu(x)
        return r * r


SPELLINGS = [(Square(), torch.float32), (Power(), torch.float32), (Product(), torch.bfloat16)]


def same_step(one: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """Both give ``dtype`` under autocast, and equal values and gradients."""
    x = torch.randn(64, 96, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        results = [one(x), other(x)]
    assert [result.dtype for result in results] == [dtype, dtype]
    assert results[0].equal(results[1])
    gradients = [torch.autograd.grad(result, x, torch.ones_like(result))[0] for result in results]
    assert gradients[0].equal(gradients[1])


@pytest.mark.needs("cuda")
@pytest.mark.parametrize(("model", "dtype"), SPELLINGS, ids=lambda value: type(value).__name__)
def test_fusing_a_module_keeps_the_dtypes_of_autocast(model: nn.Module, dtype: torch.dtype) -> None:
    result = relu2ir.fuse(model)
    assert len(result.sites) == 1
    same_step(model, result.module, dtype)


@pytest.mark.needs("cuda")
@pytest.mark.parametrize(("model", "dtype"), SPELLINGS, ids=lambda value: type(value).__name__)
def test_compiling_a_module_keeps_the_dtypes_of_autocast(model: nn.Module, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    same_step(model, torch.compile(model, backend=relu2ir_backend, options={"inner": "eager"}), dtype)
