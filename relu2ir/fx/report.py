"""What `fuse` found: sites, near misses, what was not looked into; printed, a table.

The only part of the pass that asks the registry, and only when asked: a site's provider is that of the overrides in
force when it is read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from relu2ir.registry import Explanation, explain
from relu2ir.spec import OpSpec


@dataclass(frozen=True)
class Site:
    """A place that was raised to an op.

    ``tensors`` are the op's operands as the capture knew them (fake), or None where it knew none; ``dtype`` and
    ``device`` are then those of the model's parameters, and ``shape`` is None. ``providers`` is what was asked for when
    the graph was compiled. ``exact``: fusing changed no bit; otherwise half types are rounded once instead of at every
    step.
    """

    spec: OpSpec = field(repr=False)
    path: str
    source: str
    spelling: str
    tensors: tuple[torch.Tensor, ...] | None = field(default=None, repr=False)
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    providers: str | None = None
    exact: bool = True

    @property
    def op(self) -> str:
        return self.spec.qualname

    @property
    def shape(self) -> tuple[Any, ...] | None:
        return None if self.tensors is None else tuple(self.tensors[0].shape)

    @property
    def explanation(self) -> Explanation | None:
        """The registry's decisions for this place; None where not even a device is known."""
        if self.tensors is not None:
            return explain(self.spec, *self.tensors, providers=self.providers)
        if self.device is None:
            return None
        with FakeTensorMode():
            nominal = [torch.empty(2, dtype=self.dtype, device=self.device) for _ in self.spec.inputs]
        return explain(self.spec, *nominal, providers=self.providers)

    @property
    def provider(self) -> str | None:
        return None if self.explanation is None else self.explanation.chosen

    @property
    def why(self) -> str:
        return "decided when it runs" if self.explanation is None else self.explanation.reason


@dataclass(frozen=True)
class NearMiss:
    """A place that almost is an op. ``reason`` is a stable code, ``detail`` says what to change."""

    op: str
    path: str
    source: str
    spelling: str
    reason: str
    detail: str


@dataclass(frozen=True)
class Skipped:
    """A module whose forward could not be looked into, and why."""

    path: str
    reason: str


@dataclass(frozen=True)
class FuseResult:
    """``module`` is the fused copy; the rest says what was done, what was not, and where ops were before."""

    module: Any
    sites: tuple[Site, ...]
    near_misses: tuple[NearMiss, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()
    already_fused: tuple[str, ...] = ()

    def to_json(self) -> str:
        """All of it but the model, for programs; shapes as lists of sizes, or of symbols' names."""
        sites = [
            _plain(site, "op", "path", "source", "spelling", "exact", "dtype", "device", "shape", "provider", "why")
            for site in self.sites
        ]
        near_misses = [_plain(miss, *(each.name for each in fields(miss))) for miss in self.near_misses]
        skipped = [_plain(module, "path", "reason") for module in self.skipped]
        found = {"sites": sites, "near_misses": near_misses, "skipped": skipped}
        rest = {"already_fused": list(self.already_fused), "notes": list(self.notes)}
        return json.dumps(found | rest, indent=2)

    def __str__(self) -> str:
        lines = [f"{len(self.sites)} fused, {len(self.near_misses)} near misses"]
        if self.sites:
            rows = [
                (site.path or "(top)", site.op, site.spelling, _operand(site), site.provider or "-", site.source)
                for site in self.sites
            ]
            lines += _table(("module", "op", "written as", "operand", "provider", "source"), rows)
            for op, provider, why in dict.fromkeys((site.op, site.provider or "-", site.why) for site in self.sites):
                lines.append(f"  {op} -> {provider}: {why}")
        if self.near_misses:
            missed = [(m.path or "(top)", m.op, m.spelling, m.reason, m.source) for m in self.near_misses]
            lines += ["", *_table(("near miss in", "op", "written as", "reason", "source"), missed)]
            lines += [
                f"  {reason}: {detail}"
                for reason, detail in dict.fromkeys((m.reason, m.detail) for m in self.near_misses)
            ]
        if self.already_fused:
            lines += ["", f"already fused: {', '.join(dict.fromkeys(self.already_fused))}"]
        if self.skipped:
            shown = ", ".join(f"{s.path or '(top)'} ({s.reason})" for s in self.skipped[:3])
            more = f" and {len(self.skipped) - 3} more" if len(self.skipped) > 3 else ""
            lines += ["", f"not looked into: {shown}{more}; torch.compile(model, backend='relu2ir') sees all of it"]
        return "\n".join([*lines, *self.notes])


def _plain(of: object, *names: str) -> dict[str, Any]:
    values = {name: getattr(of, name) for name in names}
    if values.get("shape") is not None:
        values["shape"] = [size if type(size) is int else str(size) for size in values["shape"]]
    return {
        name: value if isinstance(value, str | bool | list) or value is None else str(value).removeprefix("torch.")
        for name, value in values.items()
    }


def _operand(site: Site) -> str:
    dtype = str(site.dtype).removeprefix("torch.") if site.dtype is not None else "-"
    return dtype if site.shape is None else f"{dtype} [{', '.join(map(str, site.shape))}]"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in (head, *rows)]
