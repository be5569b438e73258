"""The harness itself: what the matrix's table says, and that neither silence nor a missing tool passes for success."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from matrix_table import CELL, FOLDED, TRANSFORM, BackendMatrix, MatrixTable

from relu2ir import registry

TESTS = Path(__file__).parent
NEEDS_HIPCC = """
import pytest

@pytest.mark.needs("hipcc")
def test_it():
    pass
"""


def report(outcome, *properties, reason=""):
    longrepr = ("file", 1, f"Skipped: {reason}") if outcome == "skipped" else None
    return SimpleNamespace(when="call", outcome=outcome, skipped=outcome == "skipped", longrepr=longrepr,
                           user_properties=properties)  # fmt: skip


def table(*reports):
    made = BackendMatrix()
    for each in reports:
        made.pytest_runtest_logreport(each)
    return made


def exit_status(made):
    session = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    made.pytest_sessionfinish(session)
    return session.exitstatus


def test_the_table_counts_outcomes_and_gives_a_reason():
    made = table(
        report("passed", (CELL, ["cpu", "native", "f"])),
        report("passed", (CELL, ["cpu", "native", "f"])),
        report("skipped", (CELL, ["xpu", "native", "f"]), reason="no xpu"),
        report("passed", (FOLDED, [["cpu", "triton", "f", "failed", ""], ["cpu", "triton", "f", "passed", ""]])),
    )
    assert [line.split(maxsplit=6) for line in made.lines()] == [
        ["platform", "provider", "op", "passed", "failed", "skipped"],
        ["cpu", "native", "f", "2", "0", "0"],
        ["cpu", "triton", "f", "1", "1", "0"],
        ["xpu", "native", "f", "0", "0", "1", "no xpu"],
    ]


def test_a_provider_that_could_run_but_only_skipped_fails_the_run():
    skipped = report("skipped", (CELL, ["cpu", "native", "f"]), reason="odd")
    assert table(skipped).idle() == ["native"]
    assert exit_status(table(skipped)) == pytest.ExitCode.TESTS_FAILED
    assert exit_status(table(skipped, report("passed", (CELL, ["cpu", "native", "f"])))) == pytest.ExitCode.OK


def test_a_provider_that_is_missing_or_was_not_selected_may_be_idle(monkeypatch):
    monkeypatch.setitem(registry.PROVIDERS, "absent", SimpleNamespace(missing=lambda: "not here"))
    assert table(report("skipped", (CELL, ["cpu", "absent", "f"]), reason="not here")).idle() == []
    assert table(report("skipped", (CELL, ["xpu", "native", "f"]), reason="no xpu")).idle() == []
    assert table().idle() == []


@pytest.mark.parametrize(("options", "outcome"), [((), "1 skipped"), (("--require", "hipcc,cxx"), "1 error")])
def test_what_is_required_and_missing_fails_instead_of_skipping(tmp_path, options, outcome):
    (tmp_path / "test_it.py").write_text(NEEDS_HIPCC)
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(tmp_path),
        "-p",
        "no:cacheprovider",
        "-p",
        "conftest",
        "-qra",
        *options,
    ]
    result = subprocess.run(
        command,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": "", "PYTHONPATH": f"{TESTS}"},
    )
    assert outcome in result.stdout, result.stdout + result.stderr
    assert "hipcc was not found on PATH" in result.stdout


def test_outcomes_are_written_for_the_process_that_asked(tmp_path):
    made = BackendMatrix(str(tmp_path / "counts.json"))
    made.pytest_runtest_logreport(report("passed", (CELL, ["cpu", "triton", "f"])))
    exit_status(made)
    assert json.loads((tmp_path / "counts.json").read_text()) == [["cpu", "triton", "f", "passed", ""]]


def test_the_transform_matrix_has_a_table_of_its_own():
    made = MatrixTable(TRANSFORM, "transform matrix", "transform")
    for op in ("f", "g"):
        made.pytest_runtest_logreport(report("passed", (TRANSFORM, ["vmap", "native", op])))
    made.pytest_runtest_logreport(report("passed", (CELL, ["cpu", "native", "f"])))
    assert [line.split() for line in made.lines()] == [
        ["transform", "provider", "op", "passed", "failed", "skipped"],
        ["vmap", "native", "(each)", "1", "0", "0"],
    ]
