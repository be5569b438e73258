"""The builtin in front of each op: it answers as the Python rule does, remembers nothing too long, leaks nothing."""

from __future__ import annotations

import contextlib
import inspect
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import pytest
import torch
from torch import Tensor

import relu2ir
from relu2ir import eager, library, registry
from relu2ir.providers.compiled import CPP
from relu2ir.registry import Provider
from relu2ir.spec import OpSpec

pytestmark = pytest.mark.needs("cpp")

ROOT = Path(__file__).parents[1]
X = torch.tensor([-1.0, 0.5, 3.0, float("nan")])
PACKED = torch.tensor([[-1.0, 0.5, 2.0, 3.0]])
GATED = """
namespace: front
ops:
  gated:
    inputs: [gate, up]
    expr: silu(gate) * up
  bounded:
    inputs: [x]
    params: {limit: 7.0}
    expr: where(x > limit, limit, x)
"""


class Sub(torch.Tensor):
    pass


def constant(name: str, value: float) -> Provider:
    """A provider whose kernels give ``value`` everywhere; it refuses operands of different kinds."""

    def refuses(spec: OpSpec, tensors: Any) -> str | None:
        kinds = {(tensor.dtype, tuple(tensor.shape)) for tensor in tensors}
        return "they differ" if len(kinds) > 1 else None

    def lower(spec: OpSpec) -> Callable[..., Tensor]:
        return lambda *args: torch.full_like(args[0], value)

    return Provider(name, missing=lambda: None, refuses=refuses, lower=lower)


def failing(spec: OpSpec) -> Callable[..., Tensor]:
    def kernel(*args: Any) -> Tensor:
        raise ZeroDivisionError("the kernel failed")

    return kernel


@pytest.fixture(autouse=True)
def _providers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``ones`` and ``twos`` give these, ``fails`` raises."""
    fails = Provider("fails", missing=lambda: None, refuses=lambda spec, tensors: None, lower=failing)
    for provider in (constant("ones", 1.0), constant("twos", 2.0), fails):
        monkeypatch.setitem(registry.PROVIDERS, provider.name, provider)
    monkeypatch.setitem(registry.ROWS, "cpu", ("native",))
    relu2ir.refresh()
    yield
    monkeypatch.undo()
    relu2ir.refresh()


@pytest.fixture(scope="module", autouse=True)
def _gated(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("front") / "gated.yaml"
    path.write_text(GATED)
    relu2ir.load(path)


def python_rule(name: str) -> Callable[..., Any]:
    """The whole rule in Python, of which the builtin is the fast half."""
    spec = library.find(name)
    return library._python_front(spec, library._traced_front(spec))


def outcome(call: Callable[[Any], Tensor], function: Callable[..., Any]) -> tuple[Any, ...]:
    """All that a caller can see of a call of ``function``."""
    try:
        y = call(function)
    except Exception as error:
        return type(error), str(error)
    values = tuple(map(str, y.detach().flatten().tolist()))  # as text, NaN equals NaN
    return type(y), y.dtype, y.shape, y.stride(), y.requires_grad, y.is_inference(), values


def value(**kwargs: Any) -> float:
    """What relu_squared gives at 3: 9 from cpp and native, 1 and 2 from the constant providers."""
    return relu2ir.ops.relu_squared(X, **kwargs)[2].item()


# ** as a function **


def test_the_front_is_a_builtin_with_a_name_a_text_and_a_signature() -> None:
    for name, signature in (
        ("relu_squared", "(x, *, provider=None, save=None)"),
        ("front::gated", "(gate, up, *, provider=None, save=None)"),
    ):
        function, spec = library.function(name), library.find(name)
        assert type(function) is BuiltinFunctionType
        assert function.__name__ == spec.name
        assert function.__doc__ == python_rule(name).__doc__
        assert spec.formula in function.__doc__
        assert str(inspect.signature(function)) == signature


CALLS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "plain": ("relu_squared", lambda f: f(X)),
    "keyword": ("relu_squared", lambda f: f(x=X)),
    "provider": ("relu_squared", lambda f: f(X, provider="twos")),
    "keyword and provider": ("relu_squared", lambda f: f(x=X, provider="cpp,native")),
    "unknown provider": ("relu_squared", lambda f: f(X, provider="thirds")),
    "a request that cannot be met": ("relu_squared", lambda f: f(X.int(), provider="cpp")),
    "nothing": ("relu_squared", lambda f: f()),
    "one too many": ("relu_squared", lambda f: f(X, X)),
    "unknown keyword": ("relu_squared", lambda f: f(X, scale=2.0)),
    "twice": ("relu_squared", lambda f: f(X, x=X)),
    "a list": ("relu_squared", lambda f: f([1.0])),
    "None": ("relu_squared", lambda f: f(None)),
    "a number": ("relu_squared", lambda f: f(3.0)),
    "subclass": ("relu_squared", lambda f: f(X.as_subclass(Sub))),
    "parameter": ("relu_squared", lambda f: f(torch.nn.Parameter(X))),
    "buffer": ("relu_squared", lambda f: f(torch.nn.Buffer(X))),
    "requires grad": ("relu_squared", lambda f: f(X.clone().requires_grad_())),
    "0-d": ("relu_squared", lambda f: f(torch.tensor(3.0))),
    "empty": ("relu_squared", lambda f: f(torch.empty(3, 0))),
    "integers": ("relu_squared", lambda f: f(X[:3].int())),
    "complex": ("relu_squared", lambda f: f(torch.ones(2, dtype=torch.complex64))),
    "float64": ("relu_squared", lambda f: f(X.double())),
    "bfloat16": ("relu_squared", lambda f: f(X.bfloat16())),
    "transposed": ("relu_squared", lambda f: f(torch.arange(6.0).view(2, 3).t())),
    "negative bit": ("relu_squared", lambda f: f(torch.tensor([1 - 2j, 3 + 4j]).conj().imag)),
    "meta": ("relu_squared", lambda f: f(torch.ones(2, device="meta")).new_ones((), device="cpu")),
    "packed": ("silu_and_mul", lambda f: f(PACKED)),
    "packed, odd": ("silu_and_mul", lambda f: f(PACKED[:, :3])),
    "packed, 0-d": ("silu_and_mul", lambda f: f(torch.tensor(1.0))),
    "packed, empty": ("silu_and_mul", lambda f: f(torch.empty(0, 4))),
    "two operands": ("front::gated", lambda f: f(X, X)),
    "two operands by name": ("front::gated", lambda f: f(up=X, gate=X + 1)),
    "of two dtypes": ("front::gated", lambda f: f(X, X.double())),
    "of two shapes": ("front::gated", lambda f: f(X, X[:1])),
    "of shapes that do not broadcast": ("front::gated", lambda f: f(X, X[:2])),
    "one of two requires grad": ("front::gated", lambda f: f(X, X.clone().requires_grad_())),
    "one of two is a subclass": ("front::gated", lambda f: f(X, X.as_subclass(Sub))),
    "only one of two": ("front::gated", lambda f: f(X)),
    "the second is no tensor": ("front::gated", lambda f: f(X, 2.0)),
    "a default param": ("front::bounded", lambda f: f(4 * X)),
    "a param": ("front::bounded", lambda f: f(4 * X, limit=5.0)),
}
MODES = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("asked", [None, "cpp,native", "ones,native", "cpp"])
def test_the_builtin_does_what_the_python_rule_does(mode: str, asked: str | None) -> None:
    wrong = {}
    with relu2ir.use(providers=asked):
        for setting, (case, (name, call)) in product((torch.enable_grad, MODES[mode]), CALLS.items()):
            with setting():  # first as usual, so that choices are there that the mode must not be served by
                for _ in range(3):  # the first call chooses, the second remembers, the third is served from memory
                    ours, rule = (outcome(call, function) for function in (library.function(name), python_rule(name)))
                    if ours != rule:
                        wrong[case] = (ours, rule)
    assert not wrong


def test_a_wrong_call_says_what_the_op_takes() -> None:
    for call, message in (
        ("nothing", "relu_squared takes (Tensor x); found nothing"),
        ("one too many", "relu_squared takes (Tensor x); found 2 positional"),
        ("a list", "relu_squared takes 'x' as a tensor; found list. Pass a tensor."),
        (
            "packed, odd",
            "relu2ir::silu_and_mul reads halves [gate, up] from the last dimension of 'x', which must be even; "
            "found shape [1, 3]. Pass both parts in one tensor.",
        ),
    ):
        name, run = CALLS[call]
        assert outcome(run, library.function(name))[1] == message


def test_gradients_are_those_of_the_python_rule() -> None:
    for name, x in (("relu_squared", X[:3]), ("silu_and_mul", PACKED), ("front::bounded", 4 * X)):
        for providers in (None, "cpp,native"):
            with relu2ir.use(providers=providers):
                gradients = []
                for function in (library.function(name), library.function(name), python_rule(name)):
                    leaf = x.clone().requires_grad_()
                    function(leaf).sum().backward()
                    gradients.append(leaf.grad)
            torch.testing.assert_close(gradients[0], gradients[2], rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(gradients[1], gradients[2], rtol=0, atol=0, equal_nan=True)


# ** what it remembers **


def test_each_call_is_served_by_what_is_asked_for_there() -> None:
    asked = ["cpp", "ones", "cpp", "native", "twos", "cpp", "cpp", "ones", "ones", "native"] * 20
    found = []
    for providers in asked:
        with relu2ir.use(providers=providers):
            found.append(value())
    assert found == [{"ones": 1, "twos": 2}.get(providers, 9) for providers in asked]


def test_a_nested_request_ends_where_its_block_ends() -> None:
    with relu2ir.use(providers="cpp"):
        assert [value(), value()] == [9, 9]
        with relu2ir.use(providers="ones"):
            assert [value(), value()] == [1, 1]
        assert value() == 9
        assert value(provider="twos") == 2
        assert value() == 9


def test_another_dtype_is_another_choice() -> None:
    with relu2ir.use(providers="cpp,native"):
        for dtype in (torch.float32, torch.float64, torch.float32, torch.int32, torch.bfloat16, torch.float16) * 3:
            y = relu2ir.ops.relu_squared(torch.tensor([-2, 3]).to(dtype))
            assert (y.dtype, y.tolist()) == (dtype, [0, 9])


def test_operands_that_differ_are_not_served_by_the_choice_for_alike_ones() -> None:
    with relu2ir.use(providers="ones,native"):
        for _ in range(3):
            assert relu2ir.ops.front.gated(X, X).tolist() == [1.0] * 4
            assert relu2ir.ops.front.gated(X, X.double())[2].item() == pytest.approx(8.5732, abs=1e-3)
            assert relu2ir.ops.front.gated(X, X[1]).shape == X.shape
            assert relu2ir.ops.front.gated(X, X[1])[2].item() == pytest.approx(1.4289, abs=1e-3)


@pytest.mark.parametrize("remembered", ["cpp", "twos"])
def test_a_changed_row_is_seen_at_the_next_call(
    remembered: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = {"cpp": 9, "twos": 2}[remembered]

    def remember() -> None:
        monkeypatch.setitem(registry.ROWS, "cpu", (remembered, "native"))
        eager.forget()
        assert [value() for _ in range(3)] == [before] * 3

    remember()
    monkeypatch.setitem(registry.ROWS, "cpu", ("ones", "native"))
    eager.forget()
    assert value() == 1

    remember()
    monkeypatch.setenv("RELU2IR_PROVIDERS", "ones")
    assert value() == before, "variables are read by refresh, never per call"
    relu2ir.refresh()
    assert value() == 1
    monkeypatch.delenv("RELU2IR_PROVIDERS")
    relu2ir.refresh()
    assert value() == before

    remember()
    file = tmp_path / "row.yaml"
    file.write_text(
        "namespace: front\nplatforms:\n  cpu: [ones, native]\nops:\n  later: {inputs: [x], expr: x + x + 1}\n"
    )
    relu2ir.load(file)
    assert value() == 1


def test_threads_do_not_see_each_others_requests() -> None:
    wrong, start = [], threading.Barrier(6)

    def work(providers: str, expected: float, dtype: torch.dtype) -> None:
        x = torch.full((5_000,), 3.0, dtype=dtype)
        with relu2ir.use(providers=providers):
            start.wait()
            for _ in range(300):
                y = relu2ir.ops.relu_squared(x)
                if y.dtype != dtype or bool((y != expected).any()):
                    wrong.append((providers, dtype, y))

    asked = [("cpp", 9.0), ("ones", 1.0), ("twos", 2.0)]
    threads = [threading.Thread(target=work, args=(*a, d)) for a in asked for d in (torch.float32, torch.float64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ** what it holds on to **


def counts(x: Tensor) -> tuple[int, int]:
    """How many Python and how many C++ owners a tensor has."""
    return sys.getrefcount(x), x._use_count()


@pytest.mark.parametrize("asked", ["cpp", "fails", "fails,native", "ones", "native"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_call_leaves_no_owner_of_its_operands(asked: str, requires_grad: bool) -> None:
    x, odd = torch.randn(8, requires_grad=requires_grad), torch.randn(3)
    function = relu2ir.ops.relu_squared

    def calls() -> None:
        for _ in range(500):
            with contextlib.suppress(ZeroDivisionError):
                function(x)
            with contextlib.suppress(ValueError):
                relu2ir.ops.silu_and_mul(odd)
            with contextlib.suppress(TypeError):
                function(x, x)

    def owners() -> list[int]:
        chosen = [kernel for choice in eager.table(library.find("relu_squared")).values() for kernel in choice]
        return [*counts(x), *counts(odd), *(sys.getrefcount(each) for each in (function, *chosen))]

    with relu2ir.use(providers=asked):
        calls()
        before = owners()
        calls()
        assert owners() == before


def test_a_kernel_that_raises_lets_its_operands_go() -> None:
    forward, backward = (CPP.lower(spec) for spec in library.find("silu_and_mul").with_gradients)
    odd, x, whole = torch.randn(2, 3), torch.randn(2, 4), torch.ones(2, dtype=torch.int32)
    before = [counts(tensor) for tensor in (odd, x, whole)]
    for _ in range(200):
        for call, error, message in (
            (lambda: forward(odd), RuntimeError, "the last dimension of a packed tensor must be even"),
            (lambda: forward(whole), RuntimeError, "the kernels take float16, bfloat16, float32 and float64"),
            (lambda: forward(x, x), TypeError, "takes 1 tensors and 0 numbers; found 2 arguments"),
            (lambda: backward(x), TypeError, "takes 2 tensors and 0 numbers; found 1 arguments"),
            (lambda: backward(x, 5), TypeError, "incompatible function arguments"),
            (lambda: backward(x, x), RuntimeError, "relu2ir: "),
        ):
            with pytest.raises(error) as raised:
                call()
            assert message in str(raised.value)
    del raised  # its traceback holds the operands
    assert [counts(tensor) for tensor in (odd, x, whole)] == before


def test_a_result_belongs_to_the_caller_alone() -> None:
    own = torch.randn(8)
    with relu2ir.use(providers="cpp"):
        for _ in range(3):
            result = relu2ir.ops.relu_squared(own)
            assert counts(result) == counts(own)


# ** the kernels behind it **


def test_a_direct_kernel_of_several_operands_computes_what_plain_pytorch_does() -> None:
    spec = library.find("silu_and_mul").backward
    kernel, native = (registry.PROVIDERS[name].lower(spec) for name in ("cpp", "native"))
    for shape in ((4,), (3, 10), (0, 4), (2, 3, 6)):
        grad, x = torch.randn(*shape[:-1], shape[-1] // 2), torch.randn(shape)
        torch.testing.assert_close(kernel(grad, x), native(grad, x))
        assert kernel(grad, x).stride() == x.stride()


def test_no_dimensions_and_no_elements_reach_the_kernel() -> None:
    forward, backward, _ = (CPP.lower(spec) for spec in library.find("relu_squared").with_gradients)
    for x, expected, gradient in (
        (torch.tensor(3.0), torch.tensor(9.0), torch.tensor(6.0)),
        (torch.empty(0), torch.empty(0), torch.empty(0)),
        (torch.empty(2, 0, 3), torch.empty(2, 0, 3), torch.empty(2, 0, 3)),
    ):
        assert forward(x).equal(expected)
        assert backward(torch.ones_like(x), x).equal(gradient)
        assert relu2ir.ops.relu_squared(x, provider="cpp").equal(expected)


# ** under Dynamo **


@pytest.mark.parametrize("first", ["relu2ir", "torch._dynamo"])
def test_dynamo_traces_the_builtin_whichever_was_imported_first(first: str) -> None:
    code = f"""
        import sys, torch, {first}
        assert ("torch._dynamo" in sys.modules) == ({first!r} == "torch._dynamo")
        import relu2ir, torch._dynamo

        def backend(graph_module, inputs):
            print(*(node.target for node in graph_module.graph.nodes if node.op == "call_function"))
            return graph_module.forward

        @torch.compile(backend=backend, fullgraph=True)
        def step(x, packed):
            return relu2ir.ops.relu_squared(x), relu2ir.ops.silu_and_mul(x=packed)

        a, b = step(torch.tensor([-1.0, 3.0]), torch.zeros(2, 4))
        print(type(relu2ir.ops.relu_squared).__name__, a.tolist(), b.tolist())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "relu2ir.relu_squared.default relu2ir.silu_and_mul.default",
        "builtin_function_or_method [0.0, 9.0] [[0.0, 0.0], [0.0, 0.0]]",
    ]
