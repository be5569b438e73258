"""Random programs do the same fused as they do unfused, in every form in which the pass takes them.

The short run is the same at every time. By hand, for as long as one likes, from a seed that is printed:
``RELU2IR_FUZZ_SECONDS=3600 RELU2IR_FUZZ_SEED=7 pytest tests/test_fuse_random.py -s -k seconds``.
"""

from __future__ import annotations

import os
import time
from collections import Counter

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from graph_outcomes import CAPTURES, quiet, subject
from hypothesis import HealthCheck, given, settings
from random_graphs import Program, programs
from torch import nn

import relu2ir

SECONDS, SEED = (int(os.environ.get(f"RELU2IR_FUZZ_{name}", "0")) for name in ("SECONDS", "SEED"))
# Each capture with its examples in the short run; what one takes is from 15 ms (module) to 0.5 s (decomposed).
SHORT = {"module": 100, "symbolic_trace": 100, "with_values": 200, "dynamo": 40, "export": 25, "decomposed": 8}
COMPILERS = ("dynamo", "export", "decomposed")  # they see statements that a symbolic trace cannot hold


def held_to_itself(program: Program, capture: str, counts: Counter[str]) -> None:
    """Fail if fusing ``program`` changes anything but its speed."""
    with quiet():
        unfused = subject(program, capture)
        if unfused is None:
            return
        results = unfused.fused()
        difference = unfused.difference(results)
    counts["run"] += 1
    counts["with a site"] += any(result.sites for result in results)
    counts["with a near miss"] += any(result.near_misses for result in results)
    assert difference is None, f"{capture}: fused, this program {difference}\n{program.text}\n{program}"


def search(capture: str, examples: int, seed: int) -> Counter[str]:
    counts: Counter[str] = Counter()

    @hypothesis.seed(seed)
    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(programs(statements=capture in COMPILERS, typed=capture not in ("module", "symbolic_trace")))
    def run(program: Program) -> None:
        held_to_itself(program, capture, counts)

    torch._dynamo.reset()
    run()
    return counts


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_fused_program_does_what_it_did(capture: str) -> None:
    counts = search(capture, SHORT[capture], seed=0)
    assert counts["run"] > 0.5 * SHORT[capture], counts
    if capture == "with_values":  # of which there are most
        assert counts["with a site"] > 0.4 * counts["run"] and counts["with a near miss"] > 0.2 * counts["run"], counts


def test_an_operator_in_place_by_name() -> None:
    lines = ("v0 = torch.relu(y)", "v1 = torch.square(v0)", "v2 = operator.imul(x, 2)")
    held_to_itself(Program(lines, ("v1", "v2")), "module", Counter())


def test_an_ops_own_write_is_seen_by_its_own_later_reads() -> None:
    lines = ("v = x.clone()", "half = 0.5 * v", "w = v * 0.7978845608", "a = v.mul_(0.044715)", "b = torch.mul(v, a)")
    result = "half * (1 + torch.tanh(w * (1 + b)))"
    held_to_itself(Program(lines, (result,)), "symbolic_trace", Counter())


def test_a_product_written_the_other_way_round_keeps_its_strides() -> None:
    x, y = torch.ones(8, 4).t(), torch.ones(4, 8)
    exported = torch.export.export(Swapped(), (x, y)).module()
    result = relu2ir.fuse(exported)
    assert [miss.reason for miss in result.near_misses] == ["strides"]
    assert result.module(x, y).stride() == exported(x, y).stride() == (8, 1)
    assert len(relu2ir.fuse(torch.export.export(Swapped(), (y, y + 1)).module()).sites) == 1


def test_a_result_written_into_an_operand_keeps_its_layout() -> None:
    lines = ("v0 = torch.relu(x)", "v1, u1 = v0.chunk(2, -1)", "v2 = F.gelu(v1)", "v3 = u1.mul_(v2)")
    for capture in ("symbolic_trace", "dynamo"):
        held_to_itself(Program(lines, ("v3",)), capture, Counter())


class Swapped(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.mul(y, F.silu(x))


@pytest.mark.skipif(not SECONDS, reason="for as long as RELU2IR_FUZZ_SECONDS says")
def test_random_programs_for_seconds() -> None:
    start, seed, counts = time.monotonic(), SEED, {capture: Counter[str]() for capture in CAPTURES}
    while time.monotonic() - start < SECONDS:
        for capture in CAPTURES:
            counts[capture] += search(capture, SHORT[capture], seed)
        seed += 1
    print(f"\nseeds {SEED} to {seed - 1}, {time.monotonic() - start:.0f} s, no difference")
    for capture, found in counts.items():
        print(f"{capture}: {', '.join(f'{count} {what}' for what, count in found.items())}")
