"""torch.compile(model, backend="relu2ir") and lower: through every inner compiler, with training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import relu2ir
from relu2ir.fx import backend
from relu2ir.fx.backend import relu2ir_backend
from relu2ir.fx.report import FuseResult

INNER = (
    "eager",
    "aot_eager",
    # torch's own import of Inductor warns about torch.jit.
    pytest.param("inductor", marks=pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")),
)


class Gated(nn.Module):
    """Both ops between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (F.relu(self.up(x)) ** 2).chunk(2, -1)
        return self.down(F.silu(gate) * up)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def compiled(model: nn.Module, **options: Any) -> tuple[Callable[..., torch.Tensor], list[FuseResult]]:
    reports: list[FuseResult] = []
    return torch.compile(model, backend=relu2ir_backend, options={"on_report": reports.append, **options}), reports


def step(call: Callable[..., torch.Tensor], model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The output and every gradient."""
    model.zero_grad()
    out = call(x)
    out.sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("providers", [None, "native", "cpp,native"])
def test_training_works_through_every_inner(inner: str, providers: str | None) -> None:
    model, x = Gated(), torch.randn(3, 4)
    call, reports = compiled(model, inner=inner, **({} if providers is None else {"providers": providers}))
    for expected, found in zip(step(model, model, x), step(call, model, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert [site.op for site in reports[0].sites] == ["relu2ir::relu_squared", "relu2ir::silu_and_mul"]
    assert reports[0].sites[0].shape == (3, 8)
    opened = inner == "inductor" and providers is None
    plain = "; its ops are plain PyTorch, which Inductor fuses with their neighbours" if opened else ""
    assert reports[0].notes == (f"compiled by {inner} (options['inner']){plain}",)
    assert reports[0].sites[0].provider in (["native"] if providers != "cpp,native" else ["cpp", "native"])


def test_the_backend_is_found_by_its_name() -> None:
    pytest.importorskip("torch._dynamo")
    if "relu2ir" not in torch._dynamo.list_backends(exclude_tags=()):
        pytest.skip("relu2ir is not installed here: pip install . registers the entry point")
    model, x = Gated(), torch.randn(3, 4)
    assert torch.equal(torch.compile(model, backend="relu2ir", options={"inner": "eager"})(x), model(x))


def test_a_branch_on_none_is_fused_on_both_sides() -> None:
    def function(x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        h = F.relu(x).square()
        return h if mask is None else h * mask

    call, reports = compiled(function, inner="eager")
    x, mask = torch.randn(3, 4), torch.rand(4)
    assert torch.equal(call(x), function(x))
    assert torch.equal(call(x, mask), function(x, mask))
    assert [len(report.sites) for report in reports] == [1, 1]


def test_dynamic_shapes_are_fused_once() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.relu(x) ** 2

    reports: list[FuseResult] = []
    options = {"inner": "eager", "on_report": reports.append}
    call = torch.compile(function, backend=relu2ir_backend, dynamic=True, options=options)
    for rows in (3, 5, 9):
        x = torch.randn(rows, 4)
        assert torch.equal(call(x), function(x))
    assert len(reports) == 1
    assert "native" in str(reports[0])


# torch's own look at what the first graph returned.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_every_graph_of_a_broken_function_is_reported_with_dynamic_shapes(inner: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        h = F.relu(x) ** 2
        torch._dynamo.graph_break()
        return F.relu(h - 1).square()

    reports: list[FuseResult] = []
    options = {"inner": inner, "on_report": reports.append}
    call = torch.compile(function, backend=relu2ir_backend, dynamic=True, options=options)
    for rows in (3, 5):
        x, y = (torch.linspace(-3, 3, rows * 4).view(rows, 4).requires_grad_() for _ in range(2))
        out, expected = call(x), function(y)
        (out.sum() + expected.sum()).backward()
        assert torch.equal(out, expected) and torch.equal(x.grad, y.grad)
    assert [[site.op for site in report.sites] for report in reports] == [["relu2ir::relu_squared"]] * 2


def test_an_override_after_compiling_is_not_ignored() -> None:
    model, x = Gated(), torch.randn(3, 4)
    call, _ = compiled(model, inner="eager")
    call(x)
    with (
        relu2ir.use(providers="native"),
        pytest.raises(relu2ir.ProviderError, match=r"compiled under the overrides 'none' was called under '\*=native'"),
    ):
        call(x)
    torch._dynamo.reset()
    with relu2ir.use(providers="native"):
        assert torch.equal(call(x), model(x))
    fixed, _ = compiled(model, inner="eager", providers="native")
    fixed(x)
    with relu2ir.use(platform="xpu"):
        assert torch.equal(fixed(x), model(x))


def test_without_a_compiler_eager_runs_and_it_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend, "_cannot_compile", lambda devices: "no C++ compiler")
    model, x = Gated(), torch.randn(3, 4)
    call, reports = compiled(model)
    with caplog.at_level(logging.INFO, logger="relu2ir"):
        assert torch.equal(call(x), model(x))
    note = "run by eager: inductor cannot compile here (no C++ compiler)"
    assert reports[0].notes == (note,)
    assert caplog.messages == [f"2 ops fused; {note}"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inner": "inductr"}, "unknown inner compiler 'inductr' in options['inner']; did you mean 'inductor'?"),
        (
            {"inner": "eager", "max_autotune": True},
            "max_autotune can only be given to Inductor; found inner 'eager'. Drop it.",
        ),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    captured = fx.symbolic_trace(Gated())
    with pytest.raises(relu2ir.FuseError) as error:
        relu2ir_backend(captured, [torch.randn(3, 4)], options=options)
    assert str(error.value) == message


def targets(graph_module: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph_module.graph.nodes if node.op == "call_function"]


def test_lowering_to_native_is_the_inverse_of_fusing() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.square(torch.relu(x))

    captured, x = fx.symbolic_trace(function), torch.randn(3, 4)
    fused = relu2ir.fuse(captured).module
    before = fused.code
    lowered = relu2ir.lower(fused, x)
    assert lowered.code == captured.code
    assert fused.code == before
    assert len(relu2ir.fuse(lowered).sites) == 1


def test_lowering_shows_what_another_platform_would_run() -> None:
    fused, x = relu2ir.fuse(fx.symbolic_trace(Gated())).module, torch.randn(3, 4)
    for platform in ("cuda", "rocm"):
        shown = targets(relu2ir.lower(fused, x, platform=platform, there=True))
        assert "relu2ir_cuda.relu_squared.or_native" in shown and "relu2ir_cuda.silu_and_mul.or_native" in shown
        assert not [target for target in targets(relu2ir.lower(fused, x, platform=platform)) if "relu2ir" in target]
    assert not [
        target for target in targets(relu2ir.lower(fused, x, platform="xpu", there=True)) if "relu2ir" in target
    ]


@pytest.mark.needs("cpp")
def test_lowering_to_an_asked_for_provider_runs_it() -> None:
    model, x = Gated(), torch.randn(3, 4)
    lowered = relu2ir.lower(relu2ir.fuse(fx.symbolic_trace(model)).module, x, providers="cpp")
    assert [target for target in targets(lowered) if "relu2ir" in target] == [
        "relu2ir_cpp.relu_squared.default",
        "relu2ir_cpp.silu_and_mul.default",
    ]
    for expected, found in zip(step(model, model, x), step(lowered, model, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_a_request_that_cannot_be_met_is_refused() -> None:
    fused = relu2ir.fuse(fx.symbolic_trace(Gated())).module
    with pytest.raises(relu2ir.ProviderError, match=r"relu_squared cannot run with .*'cuda'"):
        relu2ir.lower(fused, torch.randn(3, 4), providers="cuda")


def test_lowering_needs_to_know_the_operands() -> None:
    with pytest.raises(relu2ir.FuseError, match="Give example inputs, lower\\(graph_module, x\\)"):
        relu2ir.lower(relu2ir.fuse(fx.symbolic_trace(Gated())).module)
    with pytest.raises(relu2ir.FuseError, match="Capture the model as a graph first"):
        relu2ir.lower(Gated())
