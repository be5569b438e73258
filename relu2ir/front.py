"""The public function of an op: a builtin of the extension where that is built, a Python function elsewhere.

The builtin answers the common call and hands every other to the Python function, which is the whole rule. Dynamo cannot
look into a builtin: it is told what to trace in its place.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch

from relu2ir import eager, overrides
from relu2ir.fastguard import plain_builtin
from relu2ir.providers.compiled import load
from relu2ir.spec import Layout, OpSpec

_for_dynamo: list[tuple[Callable[..., Any], Callable[..., Any]]] = []


def front(spec: OpSpec, python: Callable[..., Any], traced: Callable[..., Any]) -> Callable[..., Any]:
    """``python`` as a builtin of the same name and signature, or itself where none is built.

    ``python`` is the whole rule, ``traced`` what Dynamo traces instead of the builtin.
    """
    plain = plain_builtin()
    if plain is None:
        return python
    compiled, _ = load()
    if compiled.forget not in eager.on_forget:
        eager.on_forget.append(compiled.forget)
    params = [f"{name}={value!r}" for name, value in spec.params.items()]
    signature = ", ".join([*(input.name for input in spec.inputs), "*", *params, "provider=None", "save=None"])
    builtin = compiled.front(
        spec.name,
        f"{spec.name}({signature})\n--\n\n{python.__doc__}",
        tuple(list(Layout).index(input.layout) for input in spec.inputs),
        tuple(spec.params.values()),
        eager.table(spec),
        overrides.context_get,
        vars(overrides),
        torch.is_grad_enabled,
        python,
        plain,
    )
    _for_dynamo.append((builtin, traced))
    if "torch._dynamo" in sys.modules:
        _substitute()
    elif not any(isinstance(finder, _AfterDynamo) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterDynamo())
    return builtin


def _substitute() -> None:
    """Tell Dynamo what to trace for each builtin."""
    while _for_dynamo:
        builtin, traced = _for_dynamo.pop()
        torch.compiler.substitute_in_graph(builtin, skip_signature_check=True)(traced)


class _AfterDynamo(importlib.abc.MetaPathFinder):
    """Runs `_substitute` once ``torch._dynamo`` has been imported; importing it for that would cost 1.7 s."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "torch._dynamo":
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path, target)
        if found is not None and found.loader is not None:
            execute = found.loader.exec_module

            def exec_module(module: Any) -> None:
                sys.meta_path.remove(self)  # not before: find_spec may be asked without an import
                execute(module)
                _substitute()

            found.loader.exec_module = exec_module  # type: ignore[method-assign]
        return found
