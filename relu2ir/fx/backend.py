"""``torch.compile(model, backend="relu2ir")``: fuse the graph that Dynamo captured, then hand it to a compiler.

Under Inductor an op stays the composite op, which opens into plain PyTorch there and is fused with its neighbours; an
opaque kernel would block that (it never reduced launches in 18 graphs measured, and added some in 10). A provider that
is asked for by name is obeyed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from relu2ir import library, registry
from relu2ir.errors import FuseError, ProviderError, suggestion
from relu2ir.fx.fuse import fuse, under_autocast
from relu2ir.fx.lower import lower
from relu2ir.overrides import active

INNER = ("inductor", "aot_eager", "eager")
# What Inductor fuses with elementwise operations: these, reductions, and norms, which it opens into both.
_FUSED = {torch.Tag.pointwise, getattr(torch.Tag, "reduction", torch.Tag.pointwise)}  # torch 2.11 tags no reductions
_NORMS = ("rms_norm", "layer_norm", "group_norm", "softmax")
_OPERATORS = {"truediv": "div", "iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div"}
logger = logging.getLogger("relu2ir")


def relu2ir_backend(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph.

    Options: ``inner``, the compiler behind (``inductor`` where it can compile, else ``eager``); ``providers``, a list
    that is obeyed as in ``relu2ir.use``; ``on_report``, called with each graph's FuseResult. ``mode`` and every other
    option go to Inductor.
    """
    rest = dict(options or {})
    inner, providers, on_report = (rest.pop(name, None) for name in ("inner", "providers", "on_report"))
    if inner is None:
        inner, note = _default_inner(example_inputs)
    elif inner in INNER:
        note = f"compiled by {inner} (options['inner'])"
    else:
        raise FuseError(f"unknown inner compiler '{inner}' in options['inner']{suggestion(str(inner), INNER)}")
    if inner != "inductor" and (mode is not None or rest):
        given = [*(["mode"] if mode is not None else []), *rest]
        raise FuseError(f"{', '.join(given)} can only be given to Inductor; found inner '{inner}'. Drop it.")
    result, overrides = fuse(graph_module), active().key
    lowered = providers is not None or bool(overrides) or inner != "inductor"
    if not lowered:
        note += "; its ops are plain PyTorch, which Inductor fuses with their neighbours"
    asked = providers if lowered else "native"
    if asked is None and not overrides and under_autocast(graph_module):
        asked, note = "native", f"{note}; its ops are plain PyTorch, since autocast is on"
    module = lower(result.module, providers=asked) if lowered else result.module
    graphs = (
        [each.graph for each in module.modules() if isinstance(each, fx.GraphModule)] if inner == "inductor" else []
    )
    result = replace(
        result,
        sites=tuple(replace(site, providers=asked) for site in result.sites),
        notes=(*result.notes, note, *chain.from_iterable(map(blocked, graphs))),
    )
    logger.info("%d ops fused; %s", len(result.sites), note)
    if on_report is not None:
        on_report(result)
    run = _compile(inner, module, example_inputs, mode, rest)
    return run if providers is not None else _only_under(overrides, run)


def _only_under(overrides: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, refusing to when the overrides are no longer those by which its providers were chosen."""

    def call(*args: Any) -> Any:
        if active().key != overrides:
            raise ProviderError(
                f"a graph compiled under the overrides '{overrides or 'none'}' was called under "
                f"'{active().key or 'none'}'. Call torch.compiler.reset() to compile it again, or fix the choice with "
                "torch.compile(model, backend='relu2ir', options={'providers': ...})."
            )
        return run(*args)

    return call


def blocked(graph: fx.Graph) -> tuple[str, ...]:
    """With what Inductor could have fused the ops of ``graph`` that are opaque to it; alike notes are one."""
    names = {f"{spec.namespace}_{name}": name for spec in library.specs() for name in registry.providers()}
    notes: Counter[str] = Counter()
    for node in graph.nodes:
        provider = names.get(node.target.namespace) if isinstance(node.target, OpOverload) else None
        around = [_fusible(other) for other in (*node.all_input_nodes, *node.users)] if provider else []
        neighbours = dict.fromkeys(f"'{name}'" for name in around if name)
        if neighbours:
            op = node.target._schema.name.partition("::")[2]
            notes[
                f"{op} by '{provider}' is opaque to Inductor, which could fuse it with {', '.join(neighbours)}: "
                f"drop the request for '{provider}' to let it"
            ] += 1
    return tuple(note if count == 1 else f"{note} ({count} places)" for note, count in notes.items())


def _fusible(node: fx.Node) -> str | None:
    """The name of an operation that Inductor fuses with elementwise ones; None for any other node."""
    if isinstance(node.target, OpOverload):
        name, tags = node.target._schema.name.partition("::")[2], set(node.target.tags)
    else:
        name = str(getattr(node.target, "__name__", node.target))
        name = _OPERATORS.get(name, name)
        packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
        tags = {tag for overload in packet.overloads() for tag in getattr(packet, overload).tags} if packet else set()
    return name if tags & _FUSED or name in _NORMS else None


def _default_inner(example_inputs: Sequence[Any]) -> tuple[str, str]:
    reason = _cannot_compile({value.device.type for value in example_inputs if isinstance(value, torch.Tensor)})
    if reason is None:
        return "inductor", "compiled by inductor"
    return "eager", f"run by eager: inductor cannot compile here ({reason})"


def _cannot_compile(devices: set[str]) -> str | None:
    """Why Inductor cannot compile for ``devices`` on this machine, or None."""
    if devices <= {"cpu"}:
        from torch._inductor import cpp_builder, exc

        try:
            cpp_builder.get_cpp_compiler()
        except (exc.InvalidCxxCompiler, RuntimeError) as error:
            return str(error).strip().splitlines()[0] if str(error).strip() else "no C++ compiler"
        return None
    from torch.utils._triton import has_triton

    return None if has_triton() else "no working Triton"


def _compile(
    inner: str, module: fx.GraphModule, inputs: Sequence[Any], mode: str | None, options: Mapping[str, Any]
) -> Callable[..., Any]:
    if inner == "eager":
        return module.forward
    from torch._dynamo.backends.registry import lookup_backend

    if inner == "aot_eager":
        return lookup_backend("aot_eager")(module, inputs)
    from torch._inductor import list_mode_options

    patches = {**(list_mode_options(mode) if mode is not None else {}), **options}
    return lookup_backend("inductor")(module, inputs, config_patches=patches)
