"""With backend="relu2ir" Inductor never launches more kernels than without, for inference and for training."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from relu2ir.fx.backend import relu2ir_backend
from relu2ir.fx.report import FuseResult

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
Function = Callable[[torch.Tensor, "Weights"], torch.Tensor]
D, H = 8, 16
# A launch in the code that Inductor writes: a kernel of its own, a library's, an op that it does not open.
LAUNCH = re.compile(
    r"^ +(?:cpp_fused\w*\(|\w+\.run\(|.*\bextern_kernels\.\w+\(|.*\btorch\.ops\.[\w.]+\()", re.MULTILINE
)


class Weights(nn.Module):
    """Parameters of every block, seeded."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {"up": (D, H), "down": (H, D), "gate": (D, H), "wide": (D, 2 * H), "key": (D, D)}.items():
            setattr(self, name, nn.Parameter(torch.randn(shape) / 3))
        self.up_bias, self.down_bias = nn.Parameter(torch.randn(H)), nn.Parameter(torch.randn(D))
        self.norm, self.wide_norm = nn.Parameter(torch.ones(D)), nn.Parameter(torch.ones(H))


def relu2(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x) ** 2


def pointwise(x: torch.Tensor, w: Weights) -> torch.Tensor:
    return torch.tanh(relu2(x * 0.5 + 1)) * x


def mlp(x: torch.Tensor, w: Weights) -> torch.Tensor:
    return relu2(x @ w.up) @ w.down


def mlp_with_bias(x: torch.Tensor, w: Weights) -> torch.Tensor:
    return relu2(x @ w.up + w.up_bias) @ w.down + w.down_bias


def bitnet(x: torch.Tensor, w: Weights) -> torch.Tensor:
    return F.rms_norm(relu2(x @ w.gate) * (x @ w.up), (H,), w.wide_norm) @ w.down


def star_relu(x: torch.Tensor, w: Weights) -> torch.Tensor:
    return (0.8944 * relu2(x @ w.up) - 0.4472) @ w.down


def norm_mlp_residual(x: torch.Tensor, w: Weights) -> torch.Tensor:
    return x + relu2(F.rms_norm(x, (D,), w.norm) @ w.up) @ w.down


def rwkv_channel_mix(x: torch.Tensor, w: Weights) -> torch.Tensor:
    shifted = F.pad(x, (0, 0, 1, -1))
    mixed = torch.lerp(x, shifted, w.norm)
    return torch.sigmoid(mixed @ w.key) * (relu2(mixed @ w.up) @ w.down)


def int8_quant(x: torch.Tensor, w: Weights) -> torch.Tensor:
    h = relu2(x @ w.up)
    scale = h.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
    return (h + ((h / scale).round().clamp(-128, 127) * scale - h).detach()) @ w.down


def gau_attention(x: torch.Tensor, w: Weights) -> torch.Tensor:
    q = x @ w.key
    mask = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).tril()
    return (relu2(q @ q.t() / x.shape[0]).masked_fill(~mask, 0.0) @ (x @ w.up)) @ w.down


def swiglu(x: torch.Tensor, w: Weights) -> torch.Tensor:
    gate, up = (x @ w.wide).chunk(2, -1)
    return (F.silu(gate) * up) @ w.down


BLOCKS = (
    mlp,
    mlp_with_bias,
    bitnet,
    star_relu,
    norm_mlp_residual,
    rwkv_channel_mix,
    int8_quant,
    gau_attention,
    pointwise,
    swiglu,
)
QUICK = ("mlp", "pointwise", "bitnet", "swiglu")


@pytest.fixture(autouse=True)
def _uncached() -> Iterator[None]:
    import torch._functorch.config
    from torch._inductor import config

    with config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        yield


def launches(block: Function, train: bool, **how: Any) -> tuple[int, list[torch.Tensor]]:
    """What one step of ``block`` launches when it is compiled, and its output and gradients."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    torch.manual_seed(0)
    weights, x = Weights(), torch.randn(6, D, requires_grad=train)
    compiled = torch.compile(lambda x: block(x, weights), **how)

    def step() -> list[torch.Tensor]:
        if not train:
            with torch.no_grad():
                return [compiled(x)]
        out = compiled(x)
        out.sum().backward()
        return [out.detach(), x.grad, *(p.grad for p in weights.parameters() if p.grad is not None)]  # type: ignore[list-item]

    values, codes = run_and_get_code(step)
    # Each code defines its kernels first; what it calls stands in call().
    return sum(len(LAUNCH.findall(code.partition("def call(")[2])) for code in codes), values


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    "block", [b if b.__name__ in QUICK else pytest.param(b, marks=pytest.mark.slow) for b in BLOCKS]
)
def test_fusing_never_adds_a_launch(block: Function, train: bool) -> None:
    reports: list[FuseResult] = []
    plain, expected = launches(block, train)
    fused, found = launches(
        block, train, backend=relu2ir_backend, options={"inner": "inductor", "on_report": reports.append}
    )
    assert [len(report.sites) for report in reports] == [1]
    assert 0 < fused <= plain
    for value, other in zip(found, expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-5)


@pytest.mark.needs("cpp")
def test_an_opaque_provider_adds_launches_and_the_report_says_what_it_blocks() -> None:
    reports: list[FuseResult] = []
    plain, _ = launches(pointwise, train=False)
    options = {"inner": "inductor", "providers": "cpp", "on_report": reports.append}
    fused, _ = launches(pointwise, train=False, backend=relu2ir_backend, options=options)
    assert (plain, fused) == (1, 3)
    assert reports[0].notes == (
        "compiled by inductor (options['inner'])",
        "relu_squared by 'cpp' is opaque to Inductor, which could fuse it with 'add', 'tanh': "
        "drop the request for 'cpp' to let it",
    )
