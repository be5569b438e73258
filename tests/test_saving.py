"""What a recorded call keeps for its backward: the inputs or the result, and what of that a user may ask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import relu2ir
from relu2ir import SaveError, binaries, library, specfile
from relu2ir.counting import kernel_calls
from relu2ir.ir.expr import Name
from relu2ir.ir.gradient import gradient
from relu2ir.oracle import evaluate

OPS = [spec.name for spec in specfile.read(binaries.shipped("ops.yaml")).ops if spec.grad_from_output]
PROVIDERS = ["native", pytest.param("cpp", marks=pytest.mark.needs("cpp"))]
relu_squared = relu2ir.ops.relu_squared


def operands(name: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Seeded leaves of the op; a vector for an input that has one element per column."""
    layouts = [input.layout.value for input in library.find(name).inputs]
    shapes = {"plain": (5, 7), "vector": (7,), "scalar": ()}
    return [torch.randn(shapes[layout], dtype=dtype, requires_grad=True) for layout in layouts]


def kept(call: Any) -> list[Tensor]:
    """The tensors that autograd keeps while ``call`` runs, each storage once."""
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        found.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return list(found.values())


@pytest.mark.parametrize("name", OPS)
def test_the_declared_gradient_by_the_result_is_the_derived_one(name: str) -> None:
    spec = library.find(name)
    values = {part: torch.randn(300, dtype=torch.float64) * 4 for part in spec.parts}
    values |= {"grad": torch.randn(300, dtype=torch.float64)}
    y = evaluate(spec.expr, values, torch.float64)
    derived = gradient([(spec.expr, Name("grad"))], spec.parts)
    for part, expected in zip(spec.parts, derived):
        found = evaluate(spec.grad_from_output[part], values | {"y": y}, torch.float64)
        torch.testing.assert_close(found, evaluate(expected, values, torch.float64), rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("name", OPS)
def test_the_gradient_and_that_of_the_gradient_hold_whatever_is_kept(name: str, provider: str) -> None:
    def call(*tensors: Tensor) -> Tensor:
        return library.function(name)(*tensors, provider=provider, save="output")

    assert torch.autograd.gradcheck(call, operands(name))
    assert torch.autograd.gradgradcheck(call, operands(name))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_second_derivative_is_2_above_zero_and_0_elsewhere(provider: str) -> None:
    x = torch.tensor([-2.0, -0.0, 0.0, 1e-30, 0.3, 7.0, torch.nan], dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(relu_squared(x, provider=provider, save="output").sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second[:-1], torch.tensor([0.0, 0, 0, 2, 2, 2], dtype=torch.float64))
    assert second[-1].isnan(), "NaN flows"


@pytest.mark.parametrize("provider", PROVIDERS)
def test_only_the_result_is_kept(provider: str) -> None:
    x = torch.randn(4, 6, requires_grad=True)
    results: list[Tensor] = []
    found = kept(lambda: results.append(relu_squared(x, provider=provider, save="output")))
    assert [tensor.data_ptr() for tensor in found] == [results[0].data_ptr()]
    assert kept(lambda: relu_squared(x, provider=provider, save="input"))[0].data_ptr() != results[0].data_ptr()


@pytest.mark.parametrize(("save", "hidden"), [("input", 2), ("output", 1)])
@pytest.mark.parametrize("how", ["asked", "compiled"])
def test_an_mlp_holds_one_hidden_tensor_instead_of_two(save: str, hidden: int, how: str) -> None:
    torch._dynamo.reset()
    up, down = nn.Linear(8, 48, bias=False), nn.Linear(48, 8, bias=False)

    def mlp(x: Tensor) -> Tensor:
        return down(relu_squared(up(x), save=save))

    call = torch.compile(mlp, backend="aot_eager") if how == "compiled" else mlp
    x = torch.randn(16, 8)
    call(x)  # so that nothing but the call is seen
    held = [tensor for tensor in kept(lambda: call(x)) if tensor.numel() == 16 * 48]
    # A compiler may keep the result and a mask, or what it likes, unless it is told.
    assert len(held) == hidden or (how == "compiled" and save == "input" and len(held) <= 2)


def test_native_pytorch_keeps_two_hidden_tensors() -> None:
    up, down = nn.Linear(8, 48, bias=False), nn.Linear(48, 8, bias=False)
    x = torch.randn(16, 8)
    held = kept(lambda: down(torch.square(torch.relu(up(x)))))
    assert sum(tensor.numel() == 16 * 48 for tensor in held) == 2


# ** what may be asked **


def test_the_call_then_use_then_the_spec_decides(tmp_path: Any) -> None:
    (tmp_path / "ops.yaml").write_text(
        "namespace: keeps\nops:\n"
        "  squared_relu: {inputs: [x], expr: square(relu(x)), grad_from_output: 2 * sqrt(y) * grad, save: output}\n"
    )
    relu2ir.load(tmp_path / "ops.yaml")
    own, x = relu2ir.ops.keeps.squared_relu, torch.randn(9, requires_grad=True)

    def keeps_result(call: Any) -> bool:
        results: list[Tensor] = []
        found = kept(lambda: results.append(call()))
        return [tensor.data_ptr() for tensor in found] == [results[0].data_ptr()]

    assert keeps_result(lambda: own(x))
    assert not keeps_result(lambda: own(x, save="input"))
    with relu2ir.use(save="squared_relu=input"):
        assert not keeps_result(lambda: own(x))
        assert keeps_result(lambda: own(x, save="output"))
    assert not keeps_result(lambda: relu_squared(x))
    with relu2ir.use(save={"relu_squared": "output"}):
        assert keeps_result(lambda: relu_squared(x))
        with relu2ir.use(save="input"):
            assert not keeps_result(lambda: relu_squared(x))
    half = torch.randn(9, dtype=torch.float16, requires_grad=True)
    own(half).sum().backward()  # the op's own wish is none that could fail
    assert not keeps_result(lambda: own(half))


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda x: relu_squared(x.half(), save="output"), "in float16 the result under- and overflows"),
        (lambda x: relu2ir.ops.silu(x, save="output"), "its spec declares no 'grad_from_output'"),
        (lambda x: relu2ir.ops.relu_squared_(x.half() * 2), "in float16 the result under- and overflows"),
        (lambda x: torch.func.grad(lambda x: relu_squared(x, save="output").sum())(x), "a torch.func transform is"),
        (lambda x: relu_squared(x, save="outputs"), "cannot keep 'outputs', asked by save='outputs'; did you mean"),
        (lambda x: relu_squared(x, save="output,output"), "it lists 'output', 'output'; name each once"),
        (lambda x: relu_squared(x, save="a=b=c"), "unknown op"),
        (lambda x: relu_squared(x, save="relu_squared=output"), "a call takes one list"),
        (lambda x: relu_squared(x, save=";=;"), "is not a list of what to save such as 'output'"),
    ],
)  # fmt: skip
def test_a_request_that_cannot_be_met_is_refused_in_words(call: Any, problem: str) -> None:
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(relu2ir.Error, match=problem):
        call(x)


def test_use_refuses_what_does_not_exist_at_once() -> None:
    for words, kind in {"outptu": SaveError, "relu_sqared=output": relu2ir.OpError}.items():
        with pytest.raises(kind), relu2ir.use(save=words):
            pass
    with pytest.raises(TypeError, match="pass text"), relu2ir.use(save=1):  # type: ignore[arg-type]
        pass


def test_a_list_that_ends_in_input_never_fails() -> None:
    x = torch.randn(3, requires_grad=True)
    for call in (lambda: relu_squared(x.half()), lambda: relu2ir.ops.silu(x), lambda: relu_squared(x)):
        with relu2ir.use(save="output,input"):
            call().sum().backward()
    with relu2ir.use(save="output,input"):
        found = torch.func.grad(lambda x: relu_squared(x).sum())(x)
    assert torch.equal(found, 2 * x.relu())


def test_what_records_nothing_needs_nothing_kept() -> None:
    with relu2ir.use(save="output"):
        half = torch.tensor([-1.0, 3.0]).half()
        assert relu_squared(half).tolist() == [0, 9]
        assert relu2ir.ops.silu(half).shape == (2,)
        with torch.no_grad():
            assert relu_squared(half.requires_grad_()).tolist() == [0, 9]


def test_a_result_that_is_changed_before_the_backward_is_an_error() -> None:
    x = torch.randn(3, requires_grad=True)
    y = relu_squared(x, save="output")
    total = (y * 2).sum()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.needs("cpp")
def test_the_backward_runs_the_provider_of_the_forward() -> None:
    x = torch.randn(64, requires_grad=True)
    with kernel_calls() as calls:
        relu_squared(x, provider="cpp", save="output").sum().backward()
    assert calls == {"cpp": 2}
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * x.detach().relu())


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("provider", [None, pytest.param("cpp", marks=pytest.mark.needs("cpp"))])
def test_compiled_code_keeps_what_was_asked(backend: str, provider: str | None) -> None:
    torch._dynamo.reset()

    def call(x: Tensor) -> Tensor:
        return relu_squared(x * 2, save="output", provider=provider)

    x = torch.randn(8, requires_grad=True)
    compiled = torch.compile(call, backend=backend, fullgraph=True)
    compiled(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 8 * x.detach().relu())


@pytest.fixture
def autocast() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16):
        yield


def test_under_autocast_type_and_gradient_are_those_of_the_plain_spelling(autocast: None) -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8)
    expected = torch.square(torch.relu(x @ weight))
    (wanted,) = torch.autograd.grad(expected.float().sum(), x)
    found = relu_squared(x @ weight, save="output")
    assert found.dtype == expected.dtype
    torch.testing.assert_close(torch.autograd.grad(found.float().sum(), x)[0], wanted, rtol=0.02, atol=0.02)
