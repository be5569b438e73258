"""The backend matrix: every provider on every platform, for every op, dtype, direction and memory arrangement."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matrix_table import CELL, FOLDED, serves

import relu2ir
from relu2ir import library, operands, registry, testing
from relu2ir.ir.expr import Call, postorder
from relu2ir.ir.primitives import PRIMITIVES
from relu2ir.layout import whole_shape
from relu2ir.oracle import evaluate, mismatches, scalars
from relu2ir.platforms import DEVICE_TYPE, PLATFORMS
from relu2ir.registry import Accepted, Imagined, Rejected
from relu2ir.spec import Layout

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
OWN_OPS = [spec.qualname for spec in library.specs()]
# Shapes of expressions that the library's own ops do not have: params, two inputs, pairs, a contraction to avoid.
EXTRA_OPS = relu2ir.load(Path(__file__).parent / "matrix_ops.yaml")
# The first op of each kind of operands: its cells go through every arrangement on a CPU too. A GPU does all of all.
KINDS = {tuple(input.layout for input in spec.inputs): spec.qualname for spec in reversed(library.specs())}


def selected(cell: testing.Cell) -> testing.Cell | None:
    """The cell as it runs here; None where another one says as much."""
    if (cell.platform, cell.provider) == ("cpu", "triton"):
        # In Triton's interpreter, in a process of its own (see below), at 15 ms a block of 1024.
        brief = cell.op not in KINDS.values()
        wanted = INTERPRETED and not (brief and cell.dtype is torch.float64)
        return replace(cell, many=3_001, brief=brief) if wanted else None
    if not serves(cell.provider, cell.platform) and cell.op != OWN_OPS[0]:
        return None  # its provider does not run there, whatever the op
    full = cell.platform != "cpu" or cell.op in KINDS.values()
    return cell if full else replace(cell, many=3_001, brief=True)


ALL = [cell for each in testing.cells() if (cell := selected(each)) is not None]

pytestmark = [
    # The interpreter computes with NumPy, which warns where IEEE arithmetic gives NaN or inf.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning"),
]


def is_required(cell: testing.Cell, required: frozenset[str]) -> bool:
    """Whether ``--require`` wants it: its provider is named, and no other platform here could run it."""
    platforms = [platform for platform in PLATFORMS if serves(cell.provider, platform)]
    here = [platform for platform in platforms if testing.device_of(platform)]
    return cell.provider in required and cell.op in OWN_OPS and cell.platform in (here or platforms)


@pytest.mark.parametrize("cell", ALL, ids=str)
def test_cell(cell, required, record_property):
    record_property(CELL, [cell.platform, cell.provider, cell.op])
    reason = cell.unavailable()
    if reason is not None and is_required(cell, required):
        pytest.fail(f"--require {cell.provider}: {reason}", pytrace=False)
    cell.check()


@pytest.mark.skipif(INTERPRETED, reason="this process is the one with the interpreter")
@pytest.mark.needs("triton module")
def test_kernels_in_the_interpreter(record_property, tmp_path):
    """A function decorated under TRITON_INTERPRET=1 is interpreted for good, so these cells have their own process."""
    counts = tmp_path / "counts.json"
    command = [sys.executable, "-m", "pytest", __file__, "-k", "test_cell and cpu and triton", "-q", "--tb=short"]
    result = subprocess.run(
        [*command, "-p", "no:cacheprovider", f"--matrix-counts={counts}"],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    outcomes = json.loads(counts.read_text()) if counts.exists() else []
    record_property(FOLDED, outcomes)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert {op for _, _, op, outcome, _ in outcomes if outcome == "passed"} == {
        spec.qualname for spec in library.specs()
    }


# ** the table that users read **


def imagined(device: str, spec):
    """Operands on a device that need not be here."""
    shapes = [whole_shape(input.layout, (8, 4096)) for input in spec.inputs]
    return [Imagined(shape, torch.bfloat16, torch.device(device)) for shape in shapes]


def test_the_users_table():
    assert {platform: registry.row(platform) for platform in PLATFORMS} == {
        "cuda": ("cuda", "triton", "native"),
        "rocm": ("cuda", "triton", "native"),
        "xpu": ("native",),
        "cpu": ("native",),
    }


@pytest.mark.parametrize("op", OWN_OPS)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_each_platform_decides_by_its_row(platform, op):
    spec = library.find(op)
    explanation = registry.explain(spec, *imagined(DEVICE_TYPE[platform], spec), platform=platform)
    assert explanation.platform == platform
    assert tuple(decision.provider for decision in explanation.decisions) == registry.row(platform)
    assert explanation.there == registry.row(platform)[0]
    for decision in explanation.decisions:
        missing = registry.PROVIDERS[decision.provider].missing()
        assert decision == (Accepted(decision.provider) if missing is None
                            else Rejected(decision.provider, missing, here=True))  # fmt: skip


@pytest.mark.parametrize("device", ["meta", "mps"])
def test_a_device_without_a_row_runs_native_and_says_so(device):
    explanation = relu2ir.explain("relu_squared", *imagined(device, library.find("relu_squared")))
    assert explanation.chosen == "native"
    assert explanation.platform == device
    assert explanation.source == "no row for this device"


# ** relu_squared, to the bit **


@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
@pytest.mark.parametrize("provider", registry.PROVIDERS)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_relu_squared_is_pytorchs_to_the_bit(platform, provider, dtype, required):
    cell = testing.Cell(platform, provider, "relu2ir::relu_squared", dtype, "forward")
    reason = cell.unavailable()
    if reason is not None:
        pytest.fail(reason) if is_required(cell, required) else pytest.skip(reason)
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[torch.empty((), dtype=dtype).element_size()]
    for name, (x,) in operands.inputs(cell.spec, dtype, testing.device_of(platform)):
        (got,), expected = cell.run([x]), torch.square(torch.relu(x))
        same = (got.view(width) == expected.view(width)) | (got.isnan() & expected.isnan())
        assert bool(same.all()), f"{name}: {got[~same]} is not {expected[~same]}"


# ** the oracle can tell right from wrong **


def wrong_in(spec, change):
    """The arrangements in which right results, each operation by torch in float32, are refused once changed."""
    found = {}
    for name, tensors in operands.inputs(spec, torch.float32, torch.device("cpu"), many=3_001):
        values = scalars(spec, tensors, torch.float32)
        result = evaluate(spec.expr, values, torch.float32).expand(values[spec.parts[0]].shape)
        if mismatches(spec, [*tensors, *spec.params.values()], [change(result.clone())]):
            found[re.split(r" \(| beside", name)[0]] = None
    return list(found)


def without_its_tail(result):
    """A kernel that leaves out what does not fill a vector."""
    flat = result.flatten()
    flat[flat.numel() // 8 * 8 :] = 77.0
    return flat.view(result.shape)


@pytest.mark.parametrize("op", OWN_OPS)
def test_the_oracle_takes_the_reference_and_nothing_else(op):
    spec = library.find(op)
    assert wrong_in(spec, lambda result: result) == []
    assert "many blocks" in wrong_in(spec, without_its_tail)
    assert wrong_in(spec, lambda result: result.nan_to_num(0.0, torch.inf, -torch.inf)) == ["special values"]
    nudge = max(2.0**-19, 4 * spec.tolerance.get("float32", 0.0))
    nudged = wrong_in(spec, lambda result: result * (1 + nudge))
    assert {"contiguous", "transposed", "row-sliced"} <= set(nudged)


def test_the_inputs_hold_every_kind_of_tensor_that_a_kernel_must_read():
    spec = library.find("relu_squared")
    tensors = [x for _, (x,) in operands.inputs(spec, torch.bfloat16, torch.device("cpu"))]
    assert any(x.dim() == 0 for x in tensors)
    assert any(x.numel() == 0 for x in tensors)
    assert any(x.data_ptr() % 16 for x in tensors)
    assert any(0 in x.stride() and x.numel() for x in tensors)
    assert any(not x.is_contiguous() and x.stride(-1) == 1 for x in tensors if x.dim())
    assert any(x.stride(-1) == 2 for x in tensors if x.dim())
    assert any(x.numel() > 2**15 for x in tensors)
    special = tensors[-1]
    assert special.isnan().any() and special.isinf().any() and (special == torch.finfo(torch.bfloat16).max).any()
    assert ((special != 0) & (special.abs() < torch.finfo(torch.bfloat16).smallest_normal)).any()


def test_the_ops_of_the_matrix_cover_the_vocabulary_every_layout_and_params():
    specs = library.specs()
    used = {n.primitive for spec in specs for n in postorder(spec.exprs) if isinstance(n, Call)}
    assert used == set(PRIMITIVES)
    assert {input.layout for spec in specs for input in spec.inputs} == set(Layout)
    assert any(len(spec.inputs) > 1 for spec in specs)
    assert any(spec.params for spec in specs)
