"""What a matrix of tests did, as a table at the end of the run: platform x provider x op, or transform x provider x op.

A provider that this machine could have, but of which no selected cell of the backend matrix ran, fails the run: a
matrix that skips silently proves nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from relu2ir.registry import PROVIDERS, row
from relu2ir.testing import device_of

Key = tuple[str, str, str]
CELL, FOLDED = "matrix cell", "matrix cells of another process"
TRANSFORM = "transform cell"


def serves(provider: str, platform: str) -> bool:
    """Whether the provider is meant for the platform: it is in its row, or is `cpp`, which a CPU runs if asked."""
    return provider in row(platform) or (provider, platform) == ("cpp", "cpu")


class MatrixTable:
    """Counts outcomes per (axis, provider, op) from the reports of tests that record them under ``cell``."""

    def __init__(self, cell: str, title: str, axis: str) -> None:
        self.cell, self.title, self.axis = cell, title, axis
        self.outcomes: list[list[str]] = []
        self.counts: dict[Key, Counter[str]] = {}
        self.reasons: dict[Key, str] = {}

    def add(self, key: Key, outcome: str, reason: str = "") -> None:
        self.outcomes.append([*key, outcome, reason])
        self.counts.setdefault(key, Counter())[outcome] += 1
        if reason:
            self.reasons.setdefault(key, reason)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        for name, value in report.user_properties:
            if name == self.cell:
                reason = report.longrepr[2].removeprefix("Skipped: ") if report.skipped else ""
                self.add(tuple(value), report.outcome, reason)

    def lines(self) -> Iterator[str]:
        firsts, providers, ops = (list(dict.fromkeys(key[at] for key in self.counts)) for at in range(3))
        width, first_width = max(map(len, ops)), max(map(len, [*firsts, self.axis]))
        yield f"{self.axis:{first_width}} {'provider':9}{'op':{width}}  passed failed skipped"
        for first, provider in product(firsts, providers):
            rows = {op: self.cells((first, provider, op)) for op in ops if (first, provider, op) in self.counts}
            if len(rows) > 1 and len(set(rows.values())) == 1:
                rows = {"(each)": next(iter(rows.values()))}
            for op, cells in rows.items():
                yield f"{first:{first_width}} {provider:9}{op:{width}}  {cells}"

    def cells(self, key: Key) -> str:
        n = self.counts[key]
        return f"{n['passed']:6} {n['failed']:6} {n['skipped']:7}  {self.reasons.get(key, '')}"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.counts:
            terminalreporter.section(self.title)
            for line in self.lines():
                terminalreporter.write_line(line.rstrip())


class BackendMatrix(MatrixTable):
    """The backend matrix's, with the outcomes of other processes too."""

    def __init__(self, path: str = "") -> None:
        super().__init__(CELL, "backend matrix", "platform")
        self.path = path  # where to write the outcomes, for the process that started this one

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        super().pytest_runtest_logreport(report)
        for name, value in report.user_properties if report.when == "call" else ():
            for *key, outcome, reason in value if name == FOLDED else ():
                self.add(tuple(key), outcome, reason)

    def ran(self, provider: str) -> int:
        return sum(n["passed"] + n["failed"] for key, n in self.counts.items() if key[1] == provider)

    def idle(self) -> list[str]:
        """Providers that could run here, were selected on a platform that is here, and ran no cell."""
        selected = {key[1] for key in self.counts if device_of(key[0]) and serves(key[1], key[0])}
        return [name for name, provider in PROVIDERS.items()
                if name in selected and provider.missing() is None and not self.ran(name)]  # fmt: skip

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.path:
            Path(self.path).write_text(json.dumps(self.outcomes))
        if self.idle() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        super().pytest_terminal_summary(terminalreporter)
        for name in self.idle():
            terminalreporter.write_line(f"FAILED: provider '{name}' could run here, but no cell of it ran", red=True)
