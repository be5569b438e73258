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
from graph_outcomes import CAPTURES, quiet, subject
from hypothesis import HealthCheck, assume, given, settings
from random_graphs import Program, programs

SECONDS, SEED = (int(os.environ.get(f"RELU2IR_FUZZ_{name}", "0")) for name in ("SECONDS", "SEED"))
# Each capture with its examples in the short run; what one takes is from 15 ms (module) to 0.5 s (decomposed).
SHORT = {"module": 150, "symbolic_trace": 150, "with_values": 300, "dynamo": 60, "export": 40, "decomposed": 15}
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
        assume(capture != "module" or "operator.i" not in program.text)  # the test below
        held_to_itself(program, capture, counts)

    torch._dynamo.reset()
    run()
    return counts


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_fused_program_does_what_it_did(capture: str) -> None:
    counts = search(capture, SHORT[capture], seed=0)
    assert counts["run"] > 0.8 * SHORT[capture], counts
    if capture == "with_values":  # of which there are most
        assert counts["with a site"] > 0.5 * counts["run"] and counts["with a near miss"] > 0.3 * counts["run"], counts


@pytest.mark.xfail(strict=True, reason="fx writes operator.imul of a proxy as mul")
def test_an_operator_in_place_by_name() -> None:
    lines = ("v0 = torch.relu(y)", "v1 = torch.square(v0)", "v2 = operator.imul(x, 2)")
    held_to_itself(Program(lines, ("v1", "v2")), "module", Counter())


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
