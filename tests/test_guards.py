"""Each guard of the eager path, with a kernel that would answer visibly differently if the guard were not there."""

import contextlib

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import relu2ir
from relu2ir import eager, fastguard, registry
from relu2ir.registry import Provider

X = torch.tensor([-1.0, 0.5, 3.0])
SQUARED = torch.tensor([0.0, 0.25, 9.0])
SEVENS = torch.full((3,), 7.0)


@pytest.fixture(autouse=True)
def sevens(monkeypatch):
    """A provider whose kernels give 7 everywhere, first in the CPU row."""

    def lower(spec):
        count = len(spec.outputs)
        return lambda *args: torch.full_like(args[0], 7.0) if count == 1 else tuple([torch.full_like(args[0], 7.0)] * 2)

    provider = Provider("sevens", missing=lambda: None, refuses=lambda spec, tensors: None, lower=lower)
    monkeypatch.setitem(registry.PROVIDERS, "sevens", provider)
    monkeypatch.setitem(registry.ROWS, "cpu", ("sevens", "native"))
    eager.forget()
    yield
    eager.forget()


class Passive(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class PassiveFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Sub(torch.Tensor):
    pass


def both(x):
    """The op called both ways that reach the eager path."""
    return relu2ir.ops.relu_squared(x), torch.ops.relu2ir.relu_squared(x)


def test_plain_eager_execution_reaches_the_kernel():
    for y in (*both(X), *both(torch.nn.Parameter(X)), *both(X.clone().requires_grad_())):
        assert torch.equal(y.detach(), SEVENS)


@pytest.mark.parametrize("grad", [False, True])
def test_no_grad_and_inference_mode_reach_the_kernel(grad):
    with torch.set_grad_enabled(grad):
        assert torch.equal(relu2ir.ops.relu_squared(X), SEVENS)
    with torch.inference_mode():
        assert torch.equal(relu2ir.ops.relu_squared(X), SEVENS)


def test_a_default_device_is_no_reason_to_leave_the_kernel():
    torch.set_default_device("cpu")
    try:
        assert torch.equal(relu2ir.ops.relu_squared(X), SEVENS)
    finally:
        torch.set_default_device(None)


def test_a_dispatch_mode_sees_plain_pytorch():
    with Passive():
        for y in both(X):
            assert torch.equal(y, SQUARED)


def test_a_function_mode_sees_plain_pytorch():
    with PassiveFunctions():
        assert torch.equal(relu2ir.ops.relu_squared(X), SQUARED)


def test_a_subclass_runs_plain_pytorch():
    for y in both(X.as_subclass(Sub)):
        assert torch.equal(y.as_subclass(torch.Tensor), SQUARED)


def test_autocast_runs_plain_pytorch():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for y in both(X):
            assert torch.equal(y.float(), SQUARED)
    with torch.autocast("cuda", dtype=torch.bfloat16) if torch.cuda.is_available() else contextlib.nullcontext():
        assert torch.equal(relu2ir.ops.relu_squared(X), SEVENS), "autocast of another device is no reason"


def test_a_negative_bit_runs_plain_pytorch():
    lazy = torch.complex(torch.zeros(3), -X).conj().imag
    assert lazy.is_neg()
    for y in both(lazy):
        assert torch.equal(y, SQUARED)


def test_a_sparse_tensor_runs_plain_pytorch():
    for y in both(X.to_sparse()):
        assert torch.equal(y.to_dense(), SQUARED)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_does_what_pytorch_does():
    nested = torch.nested.nested_tensor([X, X[1:]])
    for op in (relu2ir.ops.relu_squared, torch.ops.relu2ir.relu_squared):
        with pytest.raises(NotImplementedError, match="aten::pow"):  # torch.square has no kernel for it
            op(nested)


def test_a_zero_tensor_without_memory_runs_plain_pytorch():
    for y in both(torch._efficientzerotensor(3)):
        assert torch.equal(y + 0, torch.zeros(3))


def test_a_meta_tensor_runs_plain_pytorch():
    assert all(y.shape == (3,) and y.is_meta for y in both(X.to("meta")))


@pytest.mark.parametrize("way", [0, 1])
def test_torch_func_transforms_run_plain_pytorch(way):
    def op(x):
        return both(x)[way]

    assert torch.equal(torch.vmap(op)(X[None])[0], SQUARED)
    assert torch.equal(torch.func.grad(lambda x: op(x).sum())(X), 2 * X.relu())
    assert torch.equal(torch.func.jvp(op, (X,), (torch.ones(3),))[1], 2 * X.relu())
    assert torch.equal(torch.func.hessian(lambda x: op(x).sum())(X).diagonal(), torch.tensor([0.0, 2.0, 2.0]))


@pytest.mark.parametrize("way", [0, 1])
def test_forward_mode_ad_runs_plain_pytorch(way):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, torch.ones(3))
        assert torch.equal(forward_ad.unpack_dual(both(dual)[way]).tangent, 2 * X.relu())


def test_a_trace_records_plain_pytorch():
    traced = torch.jit.trace(lambda x: relu2ir.ops.relu_squared(x), X, check_trace=False)
    assert torch.equal(traced(X), SQUARED)
    graph = torch.fx.experimental.proxy_tensor.make_fx(relu2ir.ops.relu_squared)(X)
    assert torch.equal(graph(X), SQUARED)


def test_the_backward_of_the_second_derivative_runs_plain_pytorch():
    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(relu2ir.ops.relu_squared(x).sum(), x, create_graph=True)
    assert torch.equal(first.detach(), 2 * X.relu())
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(second, torch.tensor([0.0, 2.0, 2.0]))


def test_a_vmapped_backward_runs_plain_pytorch():
    x = X.clone().requires_grad_()
    y = relu2ir.ops.relu_squared(x)
    (grads,) = torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True)
    assert torch.equal(grads, torch.diag(2 * X.relu()))


def test_the_backward_runs_the_provider_that_the_forward_chose():
    x = X.clone().requires_grad_()
    y = relu2ir.ops.relu_squared(x)
    with relu2ir.use(providers="native"):
        y.sum().backward()
    assert torch.equal(x.grad, SEVENS)


@pytest.mark.parametrize("transform", [torch.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())])
def test_an_explicit_request_is_refused_where_only_plain_pytorch_can_run(transform):
    with pytest.raises(relu2ir.ProviderError, match=r"only native can run: a torch.func transform is active"):
        transform(lambda x: relu2ir.ops.relu_squared(x, provider="sevens"))(X)
    with relu2ir.use(providers="sevens,native"):
        transform(relu2ir.ops.relu_squared)(X)


@pytest.mark.needs("cpp")
def test_dispatch_keys_that_the_rule_calls_plain_are_learnt_but_not_those_of_autocast():
    """Within a backward torch 2.11 has other keys than outside."""
    x, plain = torch.randn(3), fastguard.plain_builtin()
    if plain is None:
        pytest.skip("this torch hides its dispatch keys")
    ask = fastguard.is_plain()
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    with torch._C._ExcludeDispatchKeyGuard(keys):
        assert ask(x)
        assert plain(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert not ask(x)
            assert not plain(x)
    assert not ask(x.to_sparse())
