"""Spec files that installed packages bring along: entry points of the group ``relu2ir.ops``. Needs no torch.

The value ``package:file.yaml`` names a file inside the package, ``package.folder:file.yaml`` one further in. The
package is found, never imported: a spec file must not cost what its package costs, nor run any of its code.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from relu2ir.errors import Problem, SpecError

GROUP = "relu2ir.ops"


@dataclass(frozen=True)
class Packaged:
    """One such entry point: its value and the distribution that has it."""

    value: str
    distribution: str

    def __str__(self) -> str:
        return f"{self.distribution} ({self.value})"

    def path(self) -> Path:
        """Where the file is; SpecError if there is no such package or file."""
        package, _, file = self.value.partition(":")
        top, *below = package.strip().split(".")
        try:
            found = find_spec(top)
        except Exception:  # ValueError for a module without a __spec__; a finder of someone else may raise anything
            found = None
        if found is None or not found.submodule_search_locations:
            raise self._problem(f"there is no package '{top}'")
        paths = [Path(folder, *below, file.strip()) for folder in found.submodule_search_locations]
        for path in paths:
            if path.is_file():
                return path
        raise self._problem(f"there is no file {paths[0]}")

    def _problem(self, message: str) -> SpecError:
        wanted = f"; the entry point of {self.distribution} must be package:file.yaml"
        return SpecError([Problem(self.value, 0, 0, message + wanted)])


def entries() -> list[Packaged]:
    """Those of every installed distribution, by its name: the order does not depend on the file system's."""
    found = [Packaged(e.value, e.dist.name if e.dist else e.name) for e in entry_points(group=GROUP)]
    return sorted(found, key=str)


rejected: dict[str, str] = {}
"""Those that could not be loaded, each as `Packaged` prints, with the reason."""
