"""What a test may need from the machine, by name, and why it is missing."""

from __future__ import annotations

import os
import shutil
from functools import cache
from importlib.util import find_spec

from relu2ir.registry import PROVIDERS

# Each tool by the variable that overrides it and the commands by which it is found.
_TOOLS = {"nvcc": ("", ("nvcc",)), "hipcc": ("", ("hipcc",)), "cxx": ("CXX", ("g++", "c++", "clang++"))}


@cache
def tool(name: str) -> str | None:
    """The path of a tool, or None."""
    variable, commands = _TOOLS[name]
    return next(filter(None, map(shutil.which, [os.environ.get(variable, ""), *commands])), None)


def why_missing(name: str) -> str | None:
    """Why this machine has no ``name`` (a tool, a provider, or as in ``"triton module"`` a module), or None."""
    if name in _TOOLS:
        return None if tool(name) else f"{name} was not found on PATH"
    if name.endswith(" module"):
        module = name.removesuffix(" module")
        return None if find_spec(module) else f"{module} is not installed"
    return PROVIDERS[name].missing()
