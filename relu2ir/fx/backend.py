"""``torch.compile(model, backend="relu2ir")``: fuse the graph that Dynamo captured, then hand it to a compiler.

Under Inductor an op stays the composite op, which opens into plain PyTorch there and is fused with its neighbours; an
opaque kernel would block that (it never reduced launches in 18 graphs measured, and added some in 10). A provider that
is asked for by name is obeyed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from relu2ir.errors import FuseError, ProviderError, suggestion
from relu2ir.fx.fuse import fuse, under_autocast
from relu2ir.fx.lower import lower
from relu2ir.overrides import active

INNER = ("inductor", "aot_eager", "eager")
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
    result = replace(
        result, sites=tuple(replace(site, providers=asked) for site in result.sites), notes=(*result.notes, note)
    )
    logger.info("%d ops fused; %s", len(result.sites), note)
    if on_report is not None:
        on_report(result)
    module = lower(result.module, providers=asked) if lowered else result.module
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
