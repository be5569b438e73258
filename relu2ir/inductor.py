"""The pass inside Inductor: `fusing` puts it into one of Inductor's slots for custom passes.

>>> with relu2ir.inductor.fusing(providers="cpp,native") as fused:
...     torch.compile(model)(x)
>>> print(fused)

``torch.compile(model, backend="relu2ir")`` runs the same pass in front of Inductor and its caches, which is enough for
most; this one is for what has its own backend and calls Inductor below it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor import codecache, config, custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass

from relu2ir import binaries, library, registry
from relu2ir.errors import FuseError, suggestion
from relu2ir.fx.backend import blocked
from relu2ir.fx.fuse import find, fuse_in_place
from relu2ir.fx.lower import lower_in_place
from relu2ir.fx.report import FuseResult
from relu2ir.overrides import active

Where: TypeAlias = Literal["pre_grad", "post_grad"]
SLOTS = {"pre_grad": "pre_grad_custom_pass", "post_grad": "post_grad_custom_post_pass"}
# torch before 2.12 has none; every pass is then called with its graph alone.
_InferenceAware = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", CustomGraphPass)

# Of the code that was loaded, its version included: an edit of the files afterwards does not change what it does.
_SOURCES = binaries.digest(*(path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py"))))


@dataclass
class Fused:
    """What the pass found: ``results``, one FuseResult per graph that Inductor gave it, and ``cached``.

    Graphs below a graph (a checkpointed region, a branch) come by themselves. A compiled graph that Inductor finds in
    its caches is not given to any pass, so ``results`` knows nothing of it: ``cached`` is how many.
    """

    results: list[FuseResult] = field(default_factory=list)
    cached: int = 0

    def __str__(self) -> str:
        lines = [str(result) for result in self.results]
        if self.cached:
            graphs, were = ("graph", "was") if self.cached == 1 else ("graphs", "were")
            lines.append(f"{self.cached} {graphs} came from the compile cache and {were} not looked into here")
        return "\n\n".join(lines) or "no graph was compiled"


class FusePass(CustomGraphPass):
    """The pass as an object of Inductor's: called with a graph, it fuses and lowers it in place.

    ``where`` is the slot that it is made for. In ``pre_grad`` ops are raised, and each stays open to Inductor unless a
    provider is asked for, by ``providers`` or by an override: then it is that provider's differentiable op. In
    ``post_grad``, after autograd, an asked-for provider's kernel is called; without a request nothing is changed.
    Raises ProviderError, while compiling, for a request that cannot be met.
    """

    def __init__(self, where: Where = "pre_grad", providers: str | None = None) -> None:
        if where not in SLOTS:
            raise FuseError(f"unknown slot '{where}' in where={where!r}{suggestion(str(where), SLOTS)}")
        if providers is not None:
            registry.requested(library.specs()[0], providers)  # unreadable or unknown: now, not while compiling
        self.where, self.providers, self.fused = where, providers, Fused()

    def __call__(self, graph: fx.Graph) -> None:
        asked, after = self.providers is not None or bool(active().key), self.where == "post_grad"
        notes: tuple[str, ...]
        if asked:
            result = fuse_in_place(graph, inference=after, autocast=_under_autocast(after))
            lower_in_place(graph, self.providers, level="post_grad" if after else "torch")
            notes = blocked(graph)
        elif after:
            result = find(graph, inference=True)
            notes = ("post_grad: found and left as it was: plain PyTorch, which Inductor fuses with its neighbours",)
        else:
            result = fuse_in_place(graph, autocast=_under_autocast(after))
            notes = ("pre_grad: ops are plain PyTorch, which Inductor fuses with their neighbours",)
        choice = self.providers if asked else "native"
        sites = tuple(replace(site, providers=choice) for site in result.sites)
        self.fused.results.append(replace(result, module=None, sites=sites, notes=(*result.notes, *notes)))

    def uuid(self) -> str:
        """Equal for passes that do the same: sources, ops, requests, providers, rows of platforms and versions."""
        return binaries.digest(
            _SOURCES,
            binaries.sources(),
            torch.__version__,
            self.where,
            repr(self.providers),
            active().key,
            repr([(spec.qualname, spec.hash) for spec in library.specs()]),
            repr([(name, each.missing()) for name, each in sorted(registry.providers().items())]),
            repr(sorted(registry.ROWS.items())),
        )


class _Chain(_InferenceAware):  # type: ignore[misc, valid-type]
    """Passes as one, in order: torch before 2.12 takes no list."""

    def __init__(self, passes: tuple[Any, ...]) -> None:
        self.passes = passes

    def __call__(self, graph: fx.Graph, **inference: bool) -> None:
        for each in self.passes:
            each(graph, **inference) if isinstance(each, _InferenceAware) else each(graph)

    def uuid(self) -> tuple[Any, ...] | None:
        """None, which makes Inductor cache nothing, where a pass has none: a plain function."""
        ids = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in self.passes]
        return tuple(ids) if all(ids) else None


@contextmanager
def fusing(where: Where = "pre_grad", providers: str | None = None) -> Iterator[Fused]:
    """Within the ``with``, in this thread, let Inductor fuse what it compiles: a FusePass in its slot ``where``.

    Passes that are there run before it, and are all that is there again afterwards. What was compiled stays as it was
    compiled: run the model once inside, its backward too. Raises FuseError for an unknown slot, ProviderError for an
    unknown provider.
    """
    mine, slot = FusePass(where, providers), SLOTS[where]
    there = getattr(config, slot)
    before = tuple(there) if isinstance(there, list | tuple) else (there,) if there is not None else ()
    hits = _hits(where)
    with config.patch({slot: _Chain((*before, mine))}):
        try:
            yield mine.fused
        finally:
            mine.fused.cached = max(0, _hits(where) - hits)


def _under_autocast(after: bool) -> bool:
    """Whether a graph in front of autograd was captured under autocast; behind it types are what they are."""
    return not after and torch._C._is_any_autocast_enabled()


def _hits(where: Where) -> int:
    """How many compiled graphs came from a cache in this process, without a call of the passes in ``where``."""
    if where == "post_grad":
        return counters["inductor"]["fxgraph_cache_hit"]
    # torch before 2.12 runs these passes in front of its caches, later ones where a pass without a uuid is there.
    timing = getattr(codecache, "resolve_pre_grad_pass_timing", lambda: "early")
    return counters["aot_autograd"]["autograd_cache_hit"] if timing() == "late" else 0
