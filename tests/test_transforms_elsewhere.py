"""Transforms that need a process, a package or a group of their own; and what PyTorch itself gets wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import relu2ir
from relu2ir import library

TESTS = Path(__file__).parent
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")


class Block(nn.Module):
    """Two projections around one gated and one plain op."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 16), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return relu2ir.ops.relu_squared(self.down(relu2ir.ops.silu_and_mul(self.up(x))))


def plain(block: Block, x: Tensor) -> Tensor:
    gate, up = block.up(x).chunk(2, -1)
    return torch.square(torch.relu(block.down(torch.nn.functional.silu(gate) * up)))


def run(code: str, *args: Any) -> str:
    result = subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout


LOAD = """
import sys, torch
model = {load}(sys.argv[1])
x = torch.load(sys.argv[2])
{call}
assert "relu2ir" not in sys.modules
torch.save(found, sys.argv[3])
"""


def loaded_elsewhere(path: Path, x: Tensor, load: str, call: str, tmp_path: Path) -> Tensor:
    """What a fresh process computes from ``path`` that never imports this library."""
    torch.save(x, tmp_path / "x.pt")
    run(LOAD.format(load=load, call=call), path, tmp_path / "x.pt", tmp_path / "found.pt")
    return torch.load(tmp_path / "found.pt")


def test_a_decomposed_program_needs_no_library(tmp_path: Path) -> None:
    block, x = Block(), torch.randn(3, 4)
    path = tmp_path / "block.pt2"
    torch.export.save(torch.export.export(block, (x,)).run_decompositions(), path)
    found = loaded_elsewhere(path, x, "torch.export.load", "found = model.module()(x).detach()", tmp_path)
    torch.testing.assert_close(found, plain(block, x))


def test_an_aot_inductor_package_needs_no_library(tmp_path: Path) -> None:
    block, x = Block().eval(), torch.randn(3, 4)
    path = tmp_path / "block.pt2"
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(torch.export.export(block, (x,)), package_path=str(path))
    found = loaded_elsewhere(path, x, "torch._inductor.aoti_load_package", "found = model(x).detach()", tmp_path)
    torch.testing.assert_close(found, plain(block, x))


def test_every_sharding_of_a_distributed_tensor(tmp_path: Path) -> None:
    """Two processes; forward and backward of each op by each placement."""
    processes = [
        subprocess.Popen(
            [sys.executable, TESTS / "sharded.py", str(rank), "2", str(tmp_path / "store")],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(output[-3000:] for output in outputs)
    assert all(f"{len(library.specs())} ops" in output for output in outputs)


# ** what PyTorch gets wrong, of any function: pinned, so that a change is seen **


def squared(x: Tensor) -> Tensor:
    return torch.square(torch.relu(x))


@pytest.mark.parametrize("function", [squared, relu2ir.ops.relu_squared], ids=["plain", "op"])
def test_inductor_drops_the_tangent_of_a_dual_number(function: Any) -> None:
    """pytorch/pytorch#187284: compiled code that is handed a dual number returns no tangent."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="inductor")
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.tensor([-1.0, 3.0]), torch.ones(2))
        assert forward_ad.unpack_dual(function(dual)).tangent.tolist() == [0, 6]
        assert forward_ad.unpack_dual(compiled(dual)).tangent is None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("function", [squared, relu2ir.ops.relu_squared], ids=["plain", "op"])
def test_a_compiled_pullback_is_the_eager_one(function: Any) -> None:
    """pytorch/pytorch#172386 is about one over the parameters of a module, which is zero once it is compiled."""
    torch._dynamo.reset()
    _, pull = torch.func.vjp(function, torch.tensor([-1.0, 3.0]))
    assert pull(torch.ones(2))[0].tolist() == [0, 6]
    assert torch.compile(pull, backend="aot_eager")(torch.ones(2))[0].tolist() == [0, 6]
