"""`fuse`: the walk over a model or a graph module that finds and raises every op, on a copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.nn.modules.lazy import LazyModuleMixin

from relu2ir import library
from relu2ir.errors import FuseError
from relu2ir.fx.match import Match
from relu2ir.fx.modules import FusedForward, as_layer, mentions_an_op
from relu2ir.fx.packing import value_of
from relu2ir.fx.patterns import Pattern, patterns
from relu2ir.fx.program import edited
from relu2ir.fx.report import FuseResult, NearMiss, Site, Skipped
from relu2ir.fx.rewrite import path_of, raise_ops, region_bodies, source_of
from relu2ir.fx.structure import copy_graph, copy_structure, relink
from relu2ir.fx.trace import ModeDependent, Untraceable, own_forward, trace
from relu2ir.nn import Activation
from relu2ir.spec import OpSpec

_WAY_OUT = "torch.compile(model, backend='relu2ir') fuses it with guards"


Fusible: TypeAlias = nn.Module | fx.Graph | ExportedProgram


def find(model: Fusible, **how: Any) -> FuseResult:
    """The report of `fuse`, which takes the same arguments, without a fused model: its ``module`` is None."""
    return replace(fuse(model, **how), module=None)


def fuse(
    model: Fusible, *, specs: Iterable[OpSpec] | None = None, exact: bool = False, inference: bool = False
) -> FuseResult:
    """Raise every op that ``model`` computes: an nn.Module, a torch.fx.GraphModule or Graph, or an ExportedProgram.

    ``model`` is left untouched. The result's ``module`` is of its kind. It shares its parameters and buffers, and keeps
    its classes, hooks, train and eval behaviour and state_dict keys; activation modules that are exactly an op become
    layers of `relu2ir.nn`. ``specs`` are the ops to look for, every registered one by default; ``exact`` leaves out
    those whose fusion rounds half types less often; ``inference`` says that no gradient will flow, so that spellings
    whose gradient differs at an edge (clamp(min=0) at NaN) may be raised too. Raises FuseError for anything else.

    A graph has no guards: fuse it under the autocast that it will run under (a square is float32 there, ``r * r`` is
    not), and hook its layers before. While a module is traced no other thread may run one, as for fx.symbolic_trace.
    """
    if isinstance(model, ExportedProgram):
        results = []

        def fused(module: fx.GraphModule) -> fx.GraphModule:
            results.append(fuse(module, specs=specs, exact=exact, inference=inference))
            return results[0].module

        program = edited(model, fused)
        return replace(results[0], module=program)
    if isinstance(model, fx.Graph):
        held = fx.GraphModule(model.owning_module or nn.Module(), copy_graph(model))
        result = fuse(held, specs=specs, exact=exact, inference=inference)
        return replace(result, module=result.module.graph)
    if not isinstance(model, nn.Module):
        raise FuseError(
            f"fuse takes an nn.Module, a torch.fx.GraphModule or Graph, or an ExportedProgram; found "
            f"{type(model).__name__}. Pass a model."
        )
    if "_orig_mod" in model._modules:
        raise FuseError(
            "fuse was given a compiled model. Fuse the model before torch.compile, or use "
            "torch.compile(model, backend='relu2ir')."
        )
    looked_for = patterns(library.specs() if specs is None else specs, exact)
    how = {"exact": exact, "inference": inference}
    walk = _Walk(looked_for, _floating(model), how, _run_under_autocast(model))
    module = walk.copied(model, _Place())
    relink(walk.copies)
    return walk.result(module)


def _floating(model: nn.Module) -> torch.Tensor | None:
    """A tensor that stands for the model's dtype and device."""
    return next((p for p in model.parameters() if p.is_floating_point()), None)


@dataclass(frozen=True)
class _Place:
    """Where a module stands: its ``path``; ``call``, of a region's body, the path below it of the region's call.

    ``nested``: a graph stands above it.
    """

    path: str = ""
    call: str | None = None
    nested: bool = False

    def of(self, match: Match) -> str:
        """The path of a site: nodes of a region's body know theirs from the captured model on, or not at all."""
        return ".".join(filter(None, (self.path, path_of(match.root) or self.call)))


@dataclass
class _Walk:
    """One fuse: what to look for, which modules run under autocast, and what was found so far."""

    patterns: list[Pattern]
    example: torch.Tensor | None
    how: dict[str, bool]
    autocast: set[int] = field(default_factory=set)
    sites: list[Site] = field(default_factory=list)
    near_misses: list[NearMiss] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    already_fused: list[str] = field(default_factory=list)
    copies: dict[int, nn.Module] = field(default_factory=dict)

    def result(self, module: Any) -> FuseResult:
        found = tuple(self.sites), tuple(self.near_misses), tuple(self.skipped)
        return FuseResult(module, *found, already_fused=tuple(self.already_fused))

    def copied(self, module: nn.Module, place: _Place) -> nn.Module:
        """The fused copy of ``module`` and all below it; a module that stands in two places is one copy in both."""
        if id(module) not in self.copies:
            self.copies[id(module)] = self._copied(module, place)
        return self.copies[id(module)]

    def _copied(self, module: nn.Module, place: _Place) -> nn.Module:
        if isinstance(module, torch.jit.ScriptModule):
            self.skipped.append(Skipped(place.path, "a ScriptModule"))
            return module
        if "_orig_mod" in module._modules:
            self.skipped.append(Skipped(place.path, "a compiled module: fuse before torch.compile"))
            return module
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
            # Its first call changes its class and its hooks: a copy would do so to itself alone.
            self.skipped.append(Skipped(place.path, "a lazy module before its first call"))
            return module
        if isinstance(module, fx.GraphModule):
            graph = copy_graph(module.graph)
            calls = {body: path_of(call) or place.call or "" for body, call in region_bodies(graph).items()}
            self._raise(graph, module, place, autocast=id(module) in self.autocast)
            return copy_structure(module, self._children(module, replace(place, nested=True), calls), graph)
        if isinstance(module, Activation) or isinstance(vars(module).get("forward"), FusedForward):
            self.already_fused.append(place.path or "(top)")
        traced = self._traced(module, place)
        layer = None if traced is None else as_layer(module, *traced)
        if layer is not None:
            return layer
        new = copy_structure(module, self._children(module, place, {}))
        if traced is not None and traced[1]:
            vars(new)["forward"] = FusedForward(new, *traced)
        return new

    def _children(self, module: nn.Module, place: _Place, calls: Mapping[str, str]) -> dict[str, nn.Module | None]:
        def below(name: str) -> _Place:
            if name in calls:
                return replace(place, call=calls[name])
            return replace(place, path=f"{place.path}.{name}".lstrip("."), call=None)

        return {
            name: None if child is None else self.copied(child, below(name))  # a child may have no truth value
            for name, child in module._modules.items()
        }

    def _traced(self, module: nn.Module, place: _Place) -> tuple[fx.Graph, list[Match]] | None:
        """The graph of the module's own forward with its ops raised; None, and a word in the report, without one."""
        forward = own_forward(module)
        if forward is None:
            return None
        try:
            graph = trace(module)
        except Untraceable as reason:
            self.skipped.append(Skipped(place.path, str(reason)))
        except ModeDependent as reason:
            if mentions_an_op(forward, module.children(), self.patterns):
                source = f"{forward.__code__.co_filename}:{forward.__code__.co_firstlineno}"
                name = f"{type(module).__qualname__}.forward"
                detail = f"the forward {reason}, which a rewritten forward would not follow; {_WAY_OUT}"
                self.near_misses.append(NearMiss("-", place.path, source, name, "mode-dependent", detail))
            else:
                self.skipped.append(Skipped(place.path, str(reason)))
        else:
            return graph, self._raise(graph, module, place, autocast=False)
        return None

    def _raise(self, graph: fx.Graph, root: nn.Module, place: _Place, autocast: bool) -> list[Match]:
        """Raise the ops of ``graph`` in place and report them."""
        self._look_beside(graph, place)
        found, near = raise_ops(graph, root, self.patterns, autocast=autocast, nested=place.nested, **self.how)
        for match in found:
            values = tuple(map(value_of, match.tensors))
            known = all(isinstance(value, torch.Tensor) for value in values)
            like = values[0] if known else self.example
            self.sites.append(
                Site(
                    spec=match.spec,
                    path=place.of(match),
                    source=source_of(match.covered),
                    spelling=match.spelling,
                    tensors=values if known else None,
                    dtype=getattr(like, "dtype", None),
                    device=getattr(like, "device", None),
                    exact=match.spec.exact and not match.casts,
                )
            )
        for match in near:
            assert match.flaw is not None
            where = match.spec.qualname, place.of(match), source_of(match.covered), match.spelling
            self.near_misses.append(NearMiss(*where, match.flaw.code, match.flaw.detail))
        return found

    def _look_beside(self, graph: fx.Graph, place: _Place) -> None:
        """Report the ops that are there already, and the functions that are called as a whole and mention one."""
        namespaces = {spec.namespace for spec in library.specs()}
        for node in graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in namespaces:
                self.already_fused.append(path_of(node) or place.path or node.name)
            function = node.target if node.op == "call_function" else None
            if not isinstance(function, FunctionType) or (function.__module__ or "").partition(".")[0] == "torch":
                continue
            if mentions_an_op(function, (), self.patterns):
                source = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
                detail = f"'{function.__name__}' is called as a whole, so nothing looks into it: drop torch.fx.wrap"
                miss = NearMiss("-", place.path, source, f"{function.__name__}()", "opaque", detail)
                self.near_misses.append(miss)


def fuse_in_place(graph: fx.Graph, *, inference: bool = False, autocast: bool = False) -> FuseResult:
    """Raise the ops of ``graph`` in place, and not those of graphs below it; the result's ``module`` is None."""
    walk = _Walk(patterns(library.specs()), None, {"exact": False, "inference": inference})
    walk._raise(graph, graph.owning_module or nn.Module(), _Place(nested=True), autocast)
    return walk.result(None)


def under_autocast(module: fx.GraphModule) -> bool:
    """Whether ``module`` runs under autocast, in whole or in part; Dynamo guards on the state in which it captured."""
    return bool(_run_under_autocast(module))


def _enters_autocast(graph: fx.Graph) -> bool:
    return any(node.target is torch.amp.autocast_mode._enter_autocast for node in graph.nodes)


def _run_under_autocast(model: nn.Module) -> set[int]:
    """The ids of the modules that a graph of ``model`` runs under autocast, at least once; all if it is on now."""
    visited: set[tuple[int, bool]] = set()

    def visit(module: nn.Module, autocast: bool) -> None:
        is_graph = isinstance(module, fx.GraphModule)
        # Dynamo's nodes do not tell which bodies they span.
        autocast = autocast or (is_graph and _enters_autocast(module.graph))
        if (id(module), autocast) in visited:
            return
        visited.add((id(module), autocast))
        region = torch.ops.higher_order.wrap_with_autocast  # as torch.export writes one
        calls = region_bodies(module.graph) if is_graph else {}
        entered = {name for name, call in calls.items() if call.target is region}
        for name, child in module._modules.items():
            if child is not None:
                visit(child, autocast or name in entered)

    visit(model, torch._C._is_any_autocast_enabled())
    return {module for module, under in visited if under}
