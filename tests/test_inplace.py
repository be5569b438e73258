"""The in-place form: the result is written into the input, with PyTorch's own rules, errors and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import relu2ir
from relu2ir import binaries, specfile
from relu2ir.counting import kernel_calls

OWN = specfile.read(binaries.shipped("ops.yaml")).ops
NAMES = [spec.in_place.name for spec in OWN if spec.in_place is not None]
PROVIDERS = ["native", pytest.param("cpp", marks=pytest.mark.needs("cpp"))]
relu_squared_ = relu2ir.ops.relu_squared_


def function(name: str) -> Callable[..., Tensor]:
    return getattr(relu2ir.ops, name)


def test_the_ops_with_a_gradient_by_the_result_have_one() -> None:
    assert NAMES == ["relu_squared_", "softplus_"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32], ids=str)
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("name", NAMES)
def test_the_result_stands_in_the_input(name: str, provider: str, dtype: torch.dtype) -> None:
    values = torch.tensor([[-3.0, -0.0, 0.5, 2.0, 300.0], [1.0, 4.0, -1.0, 0.0, 7.0]]).to(dtype)
    if not dtype.is_floating_point and (name != "relu_squared_" or provider == "cpp"):
        return
    for x in (values.clone(), values.clone().t(), values.repeat(1, 2)[:, ::2], values.clone()[0, 2]):
        expected = function(name.removesuffix("_"))(x.clone(), provider=provider)
        before = x._version
        assert function(name)(x, provider=provider) is x
        assert torch.equal(x, expected)
        assert x._version > before


@pytest.mark.needs("cpp")
def test_the_kernel_writes_and_nothing_is_copied() -> None:
    x = torch.randn(1000)
    expected, address = torch.square(torch.relu(x)), x.data_ptr()
    with kernel_calls() as calls:
        relu_squared_(x, provider="cpp")
    assert calls == {"cpp": 1}
    assert x.data_ptr() == address
    assert torch.equal(x, expected)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_flow_through_it(name: str, provider: str) -> None:
    def call(x: Tensor) -> Tensor:
        return function(name)(x * 1, provider=provider)

    def through_a_view(x: Tensor) -> Tensor:
        hidden = x * 1
        function(name)(hidden[:, 1:], provider=provider)
        return hidden

    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    for each in (call, through_a_view):
        assert torch.autograd.gradcheck(each, (x,))
        assert torch.autograd.gradgradcheck(each, (x,))


def error(call: Callable[[], Any]) -> str:
    with pytest.raises(RuntimeError) as raised:
        call()
    return str(raised.value)


def overwritten(_: Tensor) -> Tensor:
    return torch.zeros(3).expand(4, 3)


def of_inference(_: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.ones(3)


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "a leaf": lambda x: x,
    "a view of a leaf": lambda x: x[1:],
    "one of several views": lambda x: (x * 2).split(2)[0],
    "an expanded tensor": overwritten,
    "a tensor of inference mode": of_inference,
}


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("what", WRONG)
def test_it_refuses_what_pytorch_refuses_in_its_words_and_loses_nothing(what: str, provider: str) -> None:
    x = torch.randn(4, requires_grad=True)
    operand = WRONG[what](x)
    before = operand.detach().clone()
    expected = error(lambda: WRONG[what](x).relu_())
    # torch names the function whose views they are as it stands in its own traceback.
    assert error(lambda: relu_squared_(operand, provider=provider))[:60] == expected[:60]
    assert torch.equal(operand.detach(), before)


def test_what_autograd_kept_from_before_is_seen_to_have_changed() -> None:
    x = torch.randn(3, requires_grad=True)
    hidden = x * 1
    total = (hidden * hidden).sum()
    relu_squared_(hidden)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_inference_mode_and_no_grad() -> None:
    x = torch.tensor([-1.0, 3.0], requires_grad=True)
    with torch.no_grad():
        assert relu_squared_(x).tolist() == [0, 9]
    with torch.inference_mode():
        assert relu_squared_(torch.tensor([-1.0, 3.0])).tolist() == [0, 9]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_code_writes_its_input(backend: str) -> None:
    torch._dynamo.reset()

    def call(x: Tensor) -> Tensor:
        hidden = x * 2
        relu_squared_(hidden)
        return hidden

    def write(x: Tensor) -> Tensor:
        return relu_squared_(x)

    x = torch.randn(6, requires_grad=True)
    torch.compile(call, backend=backend, fullgraph=True)(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 8 * x.detach().relu())
    given = torch.tensor([-1.0, 3.0])
    torch.compile(write, backend=backend, fullgraph=True)(given)
    assert given.tolist() == [0, 9]


@pytest.mark.parametrize("name", NAMES)
def test_transforms_run_it_as_plain_pytorch(name: str) -> None:
    out_of_place, x = function(name.removesuffix("_")), torch.randn(5, 3)

    def squared(x: Tensor) -> Tensor:
        return function(name)(x * 1)

    assert torch.equal(torch.vmap(function(name))(x.clone()), out_of_place(x))
    grad = torch.func.grad(lambda x: squared(x).sum())(x)
    torch.testing.assert_close(grad, torch.func.grad(lambda x: out_of_place(x).sum())(x))
    _, tangent = torch.func.jvp(squared, (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, grad)


class Squares(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        hidden = x * 2
        relu_squared_(hidden)
        return hidden


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_an_exported_program_holds_it_and_decomposes_it() -> None:
    x = torch.randn(5, 3)
    program = torch.export.export(Squares(), (x,))
    assert "torch.ops.relu2ir.relu_squared_.default" in str(program.graph)
    decomposed = program.run_decompositions()
    assert "relu2ir" not in str(decomposed.graph)
    assert torch.equal(decomposed.module()(x), torch.square(torch.relu(x * 2)))


def test_the_pass_takes_it_for_a_write() -> None:
    class Writes(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 1
            r = torch.relu(x)
            relu_squared_(r)
            return torch.square(r)

    x = torch.randn(7)
    result = relu2ir.fuse(torch.fx.symbolic_trace(Writes()))
    assert result.sites == ()
    assert torch.equal(result.module(x), Writes()(x))


def test_an_asked_for_provider_is_strict() -> None:
    with pytest.raises(relu2ir.ProviderError, match="cannot run with 'cuda'"):
        relu_squared_(torch.ones(3), provider="cuda")
