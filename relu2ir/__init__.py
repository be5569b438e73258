"""relu2ir: declare an elementwise op once in YAML; call it, fuse it and train with it everywhere.

>>> import torch, relu2ir
>>> relu2ir.ops.relu_squared(torch.tensor([-1.0, 3.0]))
tensor([0., 9.])
>>> print(relu2ir.explain("relu_squared", torch.ones(2)).chosen)
native

This file is the only assembler: it says which providers exist and reads the spec files; nothing registers itself by
being imported. Triton and the compiled extension are imported when a call first needs them.
"""

from __future__ import annotations

import importlib
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relu2ir import binaries, compilecache, eager, library, nn, overrides, packaged, registry, saving, specfile
from relu2ir.errors import BuildError, Error, FuseError, OpError, PlatformError, ProviderError, SaveError, SpecError
from relu2ir.library import ops
from relu2ir.overrides import use
from relu2ir.providers import compiled
from relu2ir.providers.compiled import CPP, CUDA
from relu2ir.providers.native import NATIVE
from relu2ir.providers.triton import TRITON
from relu2ir.registry import Explanation
from relu2ir.spec import OpSpec

if TYPE_CHECKING:
    import torch

    from relu2ir import inductor, testing
    from relu2ir.fx.fuse import find, fuse
    from relu2ir.fx.lower import lower

__version__ = "0.1.0"
__all__ = [
    "BuildError",
    "Error",
    "FuseError",
    "OpError",
    "PlatformError",
    "ProviderError",
    "SaveError",
    "SpecError",
    "build",
    "explain",
    "find",
    "fuse",
    "inductor",
    "load",
    "lower",
    "nn",
    "ops",
    "refresh",
    "testing",
    "use",
]

OPS_VARIABLE = "RELU2IR_OPS"


def load(path: str | os.PathLike[str]) -> list[OpSpec]:
    """Read a spec file and make its ops callable; return the specs that are new.

    Its ops get everything that the library's own get, but for ``cuda`` and ``cpp`` they must have been compiled, by
    `build`. Raises SpecError with every problem in the file; nothing is registered then.
    """
    file = specfile.read(os.fspath(path))
    for platform, names in file.platforms.items():
        for name in names:
            registry.provider(name, f"{file.path}: platforms.{platform}")
    new = library.register(file)
    registry.ROWS.update(file.platforms)
    eager.forget()
    return new


def build(path: str | os.PathLike[str]) -> Path:
    """Compile the ops of a spec file for the ``cpp`` and ``cuda`` providers; the path of the binary, in the cache.

    From then on ``load(path)`` in any process finds them there. Ops that are loaded already run by them at once.
    BuildError with the end of its log when it does not compile.
    """
    from relu2ir import building

    made = building.build(path)
    eager.forget()
    return made


def refresh() -> None:
    """Read RELU2IR_PROVIDERS and RELU2IR_PLATFORM again, and look again for compiled binaries: never during a call."""
    overrides.read_environment()
    eager.forget()


def explain(op: str, *tensors: torch.Tensor, providers: str | None = None, platform: str | None = None) -> Explanation:
    """Why ``op`` would run where it runs on ``tensors`` (fake and meta tensors too); launches nothing.

    The result prints as a short text, and has ``.chosen``, ``.decisions``, ``.platform`` and ``.source``. TypeError for
    more or fewer tensors than the op takes.
    """
    spec = library.find(op)
    if len(tensors) != len(spec.inputs):
        raise TypeError(f"cannot explain '{op}' for {len(tensors)} tensors; pass those of the call: ({spec.arguments})")
    return registry.explain(spec, *tensors, providers=providers, platform=platform)


def _load_packaged() -> None:
    """The spec files of installed packages; one that does not load is warned of, and never breaks this import."""
    for entry in packaged.entries():
        try:
            load(entry.path())
        except Exception as error:
            packaged.rejected[str(entry)] = f"{type(error).__name__}: {error}"
            message = f"the ops of {entry} are not loaded: {type(error).__name__}: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)


registry.PROVIDERS.update({provider.name: provider for provider in (CUDA, CPP, TRITON, NATIVE)})
load(binaries.shipped("ops.yaml"))
_load_packaged()
for _path in filter(None, os.environ.get(OPS_VARIABLE, "").split(os.pathsep)):
    load(_path)
overrides.checks.append(library.check_request)
overrides.save_checks += [library.check_op, saving.check]
compilecache.install()
eager.on_forget.append(compiled.forget)
refresh()


def __getattr__(name: str) -> Any:
    if name in ("find", "fuse", "lower"):  # the pass is imported when it is first used
        from relu2ir import fx

        return getattr(fx, name)
    if name in ("inductor", "testing"):  # these import Inductor and torch's fake tensors
        return importlib.import_module(f"relu2ir.{name}")
    raise AttributeError(f"module 'relu2ir' has no attribute {name!r}")
