"""Real models: as many activations are fused as are executed, and outputs and gradients stay what they were.

`models` is the table. What is executed is counted by `counting_mode`; what is fused, by the kernels that are called.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from counting_mode import ActivationCounter
from models import MODELS, Row, language_model, nemotron_h
from torch import nn

import relu2ir
from relu2ir.counting import kernel_calls
from relu2ir.fx.backend import relu2ir_backend
from relu2ir.fx.report import FuseResult

KERNELS = "cpp,native"  # so that kernels run, where the CPU's own choice is plain PyTorch
# An op of one primitive is never raised: there is nothing to fuse.
SINGLE = {"silu", "gelu", "gelu_tanh"}
pytestmark = pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")

Call = Callable[[torch.Tensor], Any]


def output(call: Call, x: torch.Tensor) -> torch.Tensor:
    """The logits, or what the model gives first."""
    out = call(x)
    return out if isinstance(out, torch.Tensor) else out[0]


def step(call: Call, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The output and the gradient of every parameter that has one."""
    model.zero_grad()
    out = output(call, x)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype))
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def errors(found: list[torch.Tensor], exact: list[torch.Tensor]) -> tuple[float, float]:
    """The mean and the largest difference, of each tensor in units of its largest element."""
    least = 1e-6 * max(tensor.abs().max().item() for tensor in exact)  # a gradient may be zero, but for rounding
    pairs = zip(found, exact, strict=True)
    each = torch.cat([((a.double() - b).abs() / b.abs().max().clamp_min(least)).flatten() for a, b in pairs])
    return each.mean().item(), each.max().item()


def by_op(reports: Iterable[FuseResult]) -> Counter[str]:
    return Counter(site.spec.name for report in reports for site in report.sites)


def all_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Subject:
    """A model of the table, in eval mode, and what it computes unfused, compiled and in float64."""

    def __init__(self, row: Row, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        torch._dynamo.reset()
        model, x = row.make()
        self.row, self.model, self.reports = row, model.eval().to(dtype), []
        self.x = x.to(dtype) if x.is_floating_point() else x

    @cached_property
    def compiled(self) -> Call:
        options = {"inner": "eager", "providers": KERNELS, "on_report": self.reports.append}
        return torch.compile(self.model, backend=relu2ir_backend, options=options)

    @cached_property
    def plain(self) -> list[torch.Tensor]:
        return step(self.model, self.model, self.x)

    @cached_property
    def exact(self) -> list[torch.Tensor]:
        model = copy.deepcopy(self.model).double()
        if hasattr(model, "set_experts_implementation"):  # transformers' grouped matmul takes no float64
            model.set_experts_implementation("eager")
        return step(model, model, self.x.double() if self.x.is_floating_point() else self.x)

    def holds(self, found: list[torch.Tensor], reports: Iterable[FuseResult]) -> None:
        """Bit-equal where every op is exact, else as near to float64 as unfused; an error of one element is chance."""
        if all(site.exact for report in reports for site in report.sites):
            assert all_equal(found, self.plain)
        mean, largest = errors(found, self.exact)
        plain_mean, plain_largest = errors(self.plain, self.exact)
        # exp of the cpp provider is 0.76 ulp off, libm's 0.5: in CLIP 1.11 times the error of all.
        assert mean <= 1.15 * plain_mean
        assert largest <= 1.5 * plain_largest


ROWS = [pytest.param(row, id=row.name, marks=[pytest.mark.slow] if row.slow else []) for row in MODELS]


@pytest.fixture(scope="module", params=ROWS)
def subject(request: pytest.FixtureRequest) -> Subject:
    if find_spec(request.param.package) is None:
        pytest.skip(f"{request.param.package} is not installed")
    return Subject(request.param)


@pytest.mark.needs("cpp")
def test_all_that_is_executed_is_fused_when_compiled(subject: Subject) -> None:
    with torch.no_grad(), ActivationCounter() as counter:
        subject.model(subject.x)
    executed = counter.executed()
    assert executed == subject.row.executed
    expected = {name: calls for name, calls in executed.items() if name not in SINGLE}
    if subject.row.compiled is not None:
        expected = subject.row.compiled
    subject.compiled(subject.x)
    assert by_op(subject.reports) == expected
    with kernel_calls() as calls:
        subject.compiled(subject.x)
    assert calls == ({"cpp": sum(expected.values())} if expected else {})


def test_compiled_outputs_and_gradients_hold(subject: Subject) -> None:
    found = step(subject.compiled, subject.model, subject.x)
    subject.holds(found, subject.reports)


@pytest.mark.needs("cpp")
def test_fused_modules_run_and_outputs_and_gradients_hold(subject: Subject) -> None:
    result = relu2ir.fuse(subject.model)
    assert by_op([result]) == subject.row.fused
    assert all_equal(step(result.module, subject.model, subject.x), subject.plain), "in plain PyTorch nothing changes"
    with relu2ir.use(providers=KERNELS):
        with torch.no_grad(), kernel_calls() as calls:
            result.module(subject.x)
        assert sum(calls.values()) == sum(subject.row.fused.values())
        if subject.row.fused:
            subject.holds(step(result.module, subject.model, subject.x), [result])


@pytest.mark.needs("cpp")
@pytest.mark.parametrize("name", ["Nemotron", "Llama"])
def test_bfloat16_holds_too(name: str) -> None:
    pytest.importorskip("transformers")
    subject = Subject(next(row for row in MODELS if row.name == name), torch.bfloat16)
    subject.holds(step(subject.compiled, subject.model, subject.x), subject.reports)
    result = relu2ir.fuse(subject.model)
    with relu2ir.use(providers=KERNELS):
        subject.holds(step(result.module, subject.model, subject.x), [result])


HOW = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}


@pytest.mark.needs("cpp")
def test_a_fused_model_generates_the_same_tokens_and_calls_the_kernel_at_each() -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, tokens = language_model("Nemotron", use_cache=True)()
    fused = relu2ir.fuse(model.eval()).module
    with ActivationCounter() as counter:
        expected = model.generate(tokens, **HOW)
    with relu2ir.use(providers=KERNELS), kernel_calls() as calls:
        assert torch.equal(fused.generate(tokens, **HOW), expected)
    assert calls == {"cpp": counter.executed()["relu_squared"]} == {"cpp": 5}


@pytest.mark.needs("cpp")
def test_a_compiled_model_generates_the_same_tokens_and_calls_the_kernel_at_each() -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, tokens = language_model("Llama", use_cache=True)()
    with ActivationCounter() as counter:
        expected = model.eval().generate(tokens, **HOW)
    model.forward = torch.compile(
        model.forward, backend=relu2ir_backend, options={"inner": "eager", "providers": KERNELS}
    )
    assert torch.equal(model.generate(tokens, **HOW), expected)
    with kernel_calls() as calls:
        model.generate(tokens, **HOW)
    assert calls == {"cpp": counter.executed()["silu_mul"]} == {"cpp": 5}


@pytest.mark.needs("cpp")
def test_a_loop_over_experts_calls_the_kernel_for_each_expert_that_is_hit() -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, tokens = nemotron_h("moe", experts_implementation="eager")()
    with torch.no_grad(), ActivationCounter() as counter:
        expected = output(model.eval(), tokens)
    result = relu2ir.fuse(model)
    assert [site.path for site in result.sites] == [
        "model.layers.0.mixer.experts.act_fn",
        "model.layers.0.mixer.shared_experts.act_fn",
    ]
    with torch.no_grad(), relu2ir.use(providers=KERNELS), kernel_calls() as calls:
        assert torch.equal(output(result.module, tokens), expected)
    assert calls == {"cpp": counter.executed()["relu_squared"]} == {"cpp": 4 + 1}


@pytest.mark.slow
@pytest.mark.needs("cpp")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo's own
def test_what_dynamo_does_not_capture_runs_as_it_was() -> None:
    """A graph break inside a loop over experts: Dynamo runs the whole forward around it unseen."""
    pytest.importorskip("transformers")
    make = language_model("Mixtral", num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager")
    subject = Subject(Row("Mixtral", "transformers", make, {"silu_and_mul": 4}))
    with torch.no_grad(), ActivationCounter() as counter:
        subject.model(subject.x)
    assert counter.executed() == subject.row.executed
    assert all_equal(step(subject.compiled, subject.model, subject.x), subject.plain)
    assert not by_op(subject.reports)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", ["Nemotron", "Llama"])
def test_under_inductor_nothing_changes_but_the_report(name: str) -> None:
    pytest.importorskip("transformers")
    subject = Subject(next(row for row in MODELS if row.name == name))
    expected = step(torch.compile(subject.model), subject.model, subject.x)
    torch._dynamo.reset()
    options = {"inner": "inductor", "on_report": subject.reports.append}
    call = torch.compile(subject.model, backend=relu2ir_backend, options=options)
    assert all_equal(step(call, subject.model, subject.x), expected)
    assert by_op(subject.reports) == subject.row.executed


def square_of_relu(x: torch.Tensor) -> torch.Tensor:
    r = F.relu(x.clone(), inplace=True)
    return r * r


def geglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return up * F.gelu(gate, approximate="tanh")


def written_between(x: torch.Tensor) -> torch.Tensor:
    r = F.relu(x)
    r[0] = 1.0
    return r.square()


COUNTED: list[tuple[Callable[[torch.Tensor], torch.Tensor], dict[str, int]]] = [
    (square_of_relu, {"relu_squared": 1}),
    (lambda x: F.relu(x).square() + F.relu(x + 1) ** 2, {"relu_squared": 2}),
    (lambda x: F.relu(x) * x.relu(), {"relu_squared": 1}),
    (lambda x: F.relu(x) ** 3 + torch.square(x) + x * x, {}),
    (geglu, {"gelu_tanh_and_mul": 1}),
    (lambda x: F.silu(x) * (x + 1), {"silu_mul": 1}),
    (lambda x: F.silu(x) * x, {"silu": 1}),
    (written_between, {}),
]


@pytest.mark.parametrize(("function", "expected"), COUNTED)
def test_the_yardstick_counts_formulas(function: Call, expected: dict[str, int]) -> None:
    with ActivationCounter() as counter:
        function(torch.randn(3, 4))
    assert counter.executed() == expected
