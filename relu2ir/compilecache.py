"""What torch's compile caches must know of the ops: what each means, and what is chosen.

They know an op by its name: without the tag ``torch.compile`` in a new process runs the formula of before an edit
(measured on torch 2.13 and 2.14).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch.compiler.config

from relu2ir.library import specs
from relu2ir.overrides import active

# Where in torch.compiler.config.cache_key_tag our part begins.
_TAG = ";relu2ir;"


def _tag() -> str:
    """What every op means and what is chosen here and now."""
    return ";".join([_TAG, *(f"{spec.qualname}={spec.hash}" for spec in specs()), active().key])


class _TaggedConfig(type(torch.compiler.config)):  # type: ignore[misc]
    """torch.compiler.config, whose ``cache_key_tag`` also has our part; what a user puts there is kept.

    The part is added when the tag is read, because a value that is set holds in the thread that set it only.
    """

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        return f"{value}{_tag()}" if name == "cache_key_tag" else value

    def __setattr__(self, name: str, value: object) -> None:
        if name == "cache_key_tag":  # may have been read here before, as config.patch does
            value = str(value).partition(_TAG)[0]
        super().__setattr__(name, value)


def install() -> None:
    """From now on the tag has our part."""
    # A module may be given a class (torch does the same); its own __setattr__ takes its settings only.
    ModuleType.__setattr__(torch.compiler.config, "__class__", _TaggedConfig)
