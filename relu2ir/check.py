"""``relu2ir check``: the ops of a spec file, held to their meaning by the cells that this machine can run."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch

import relu2ir
from relu2ir import operands, registry, specfile, testing
from relu2ir.ir.emit import expanded
from relu2ir.oracle import evaluate, scalars, ulp
from relu2ir.platforms import PLATFORMS
from relu2ir.testing import Cell

MOST_LINES = 12  # of one wrong cell
# Below this a float32 step on the way may underflow, which is no error of the kernel's.
LEAST_RESULT = 2.0**-100


@dataclass
class Row:
    """What the cells of one op by one provider on one platform did; ``error`` is the forward's largest, in ulp."""

    op: str
    provider: str
    platform: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    error: float = math.nan
    reason: str = ""
    wrong: list[str] = field(default_factory=list)

    @property
    def ran(self) -> bool:
        return self.passed + self.failed > 0

    def run(self, cell: Cell) -> None:
        """Run one cell and count it. Whatever its provider raises is a failure with that text."""
        try:
            reason = cell.unavailable()
            if reason is not None:
                self.skipped += 1
                self.reason = registry.provider(self.provider, "a cell").missing() or reason
                return
            if cell.direction == "forward" and cell.dtype != torch.float64:  # of which nothing wider is known
                self.error = max(largest_error(cell), self.error)  # in this order NaN is replaced
            # How PyTorch reads memory is its own: torch 2.13 cannot take gelu's gradient where elements overlap.
            replace(cell, brief=cell.provider == "native").check()
            self.passed += 1
        except AssertionError as error:
            self._fail(str(error))
        except Exception as error:
            self._fail(f"{cell}: {type(error).__name__}: {error}")

    def _fail(self, text: str) -> None:
        self.failed += 1
        lines = text.splitlines()
        more = [f"  ... and {len(lines) - MOST_LINES} lines more"] if len(lines) > MOST_LINES else []
        self.wrong.append("\n".join(lines[:MOST_LINES] + more))


def largest_error(cell: Cell) -> float:
    """The largest distance of the cell's forward results from the exact ones, in ulp of their type, on normal input."""
    device = testing.device_of(cell.platform)
    assert device is not None
    inputs = operands.inputs(cell.spec, cell.dtype, device, cell.many)
    tensors = next(tensors for name, tensors in inputs if name.startswith("many blocks"))
    (result,) = (value.detach().double().cpu() for value in cell.run(tensors))
    (expr,) = expanded(cell.spec.exprs)
    exact = evaluate(expr, scalars(cell.spec, [tensor.cpu() for tensor in tensors], torch.float64), torch.float64)
    counts = exact.to(cell.dtype).isfinite() & (exact.abs() >= LEAST_RESULT)
    return torch.where(counts, (result - exact).abs() / ulp(exact, cell.dtype), 0.0).max().item()


def check(path: str | os.PathLike[str]) -> int:
    """Verify and load the file, run its cells, print a table and every wrong cell; 1 if there is one, else 0.

    SpecError or ProviderError when the file cannot be loaded.
    """
    file = specfile.read(os.fspath(path))
    relu2ir.load(path)
    here = [platform for platform in PLATFORMS if testing.device_of(platform)]
    cells = testing.cells([spec.qualname for spec in file.ops], list(registry.providers()), here)
    rows: dict[tuple[str, str, str], Row] = {}
    for cell in _with_progress(cells):
        key = (cell.op, cell.provider, cell.platform)
        rows.setdefault(key, Row(*key)).run(cell)
    print("\n".join(_table(_shown(rows.values()))))
    wrong = [text for row in rows.values() for text in row.wrong]
    for text in wrong:
        print(f"\n{text}")
    ran = [row for row in rows.values() if row.ran]
    count = sum(row.passed + row.failed for row in ran)
    print(
        f"\n{file.path}: {len(wrong)} of {count} cells are wrong" if wrong else f"\n{file.path}: {count} cells passed"
    )
    if file.ops and not any(row.provider != "native" for row in ran):
        print("Only plain PyTorch (native) could run here: no kernel was checked.")
    return 1 if wrong else 0


def _shown(rows: Iterable[Row]) -> list[Row]:
    """The rows by op, then provider: those that ran, and of a provider that ran nowhere here its first."""
    rows = sorted(rows, key=lambda row: (row.op, list(registry.providers()).index(row.provider)))
    ran = {(row.op, row.provider) for row in rows if row.ran}
    shown: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        idle = (row.op, row.provider) not in ran
        if row.ran or idle:
            shown.setdefault((row.op, row.provider, "" if idle else row.platform), row)
    return list(shown.values())


def _table(rows: list[Row]) -> Iterator[str]:
    width = max([2, *(len(row.op) for row in rows)])
    yield f"{'op':{width}}  provider  platform  passed  failed  skipped  max ulp"
    before = ""
    for row in rows:
        error = "-" if math.isnan(row.error) else f"{row.error:.3g}"
        counts = f"{row.passed:6}  {row.failed:6}  {row.skipped:7}  {error:>7}  {row.reason}"
        yield f"{row.op if row.op != before else '':{width}}  {row.provider:8}  {row.platform:8}  {counts}".rstrip()
        before = row.op


def _with_progress(cells: list[Cell]) -> Iterator[Cell]:
    """The cells in turn; on a terminal a bar on stderr says which one runs."""
    show: Callable[[str], object] = sys.stderr.write if sys.stderr.isatty() else len
    for done, cell in enumerate(cells):
        bar = f"[{'#' * (24 * done // len(cells)):24}] {done}/{len(cells)} {cell}"
        show(f"\r\x1b[2K{bar[: shutil.get_terminal_size().columns - 1]}")
        sys.stderr.flush()
        yield cell
    show("\r\x1b[2K")
