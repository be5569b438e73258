"""Every error a user can cause, one class per kind.

A message says what was asked, what was found and what to do, in that order; the last line is an action.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches


class Error(Exception):
    """The parent of every error that relu2ir raises on purpose."""


class PlatformError(Error):
    """An unknown platform was asked for."""


class ProviderError(Error):
    """A provider that was asked for by name cannot run the call, or does not exist."""


class SaveError(Error):
    """What a backward was asked by name to keep cannot serve it."""


class OpError(Error):
    """An op that is not declared was asked for."""


class FuseError(Error):
    """An object that cannot be fused or lowered was given to the pass."""


class BuildError(Error):
    """Kernels could not be built, or those that were built cannot be loaded."""


class ExprError(Error):
    """A problem inside one expression: ``message`` about the ``width`` characters from ``start`` (0-based)."""

    def __init__(self, message: str, start: int = 0, width: int = 1) -> None:
        super().__init__(message)
        self.message, self.start, self.width = message, start, width


@dataclass(frozen=True)
class Problem:
    """One thing wrong in a spec file. ``line`` and ``column`` are 1-based; 0 means the whole file.

    ``relation``: it lies inside an expression, or between names or entries, where no JSON Schema can see it.
    """

    file: str
    line: int
    column: int
    message: str
    path: str = "$"
    excerpt: str = ""
    relation: bool = False

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        head = f"{place}: {self.message} at {self.path}"
        return f"{head}\n{self.excerpt}" if self.excerpt else head


MOST_SHOWN = 100


class SpecError(Error):
    """A spec file that cannot be loaded. ``problems`` holds everything wrong with it, in file order.

    Its text shows the first `MOST_SHOWN`: a file that is no spec at all can have tens of thousands.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda p: (p.line, p.column)))
        more = len(self.problems) - MOST_SHOWN
        shown = [*map(str, self.problems[:MOST_SHOWN]), *([f"... and {more} problems more"] if more > 0 else [])]
        super().__init__("\n".join(shown))


def listed(names: Iterable[str]) -> str:
    """``'a', 'b', 'c'``: the valid set, quoted, for the end of a message."""
    return ", ".join(f"'{name}'" for name in names) or "none"


def suggestion(name: str, valid: Iterable[str]) -> str:
    """``; did you mean 'relu'?`` when a valid name is close, the list of valid names otherwise."""
    valid = list(valid)
    close = get_close_matches(name, valid, n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else f"; valid: {listed(valid)}"
