"""Platforms: where tensors live. Read off a device, never off "the first GPU".

`RELU2IR_PLATFORM` and ``use(platform=...)`` make a call *choose* as if on another platform; they move no tensor.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from relu2ir.errors import PlatformError, suggestion

if TYPE_CHECKING:
    import torch

PLATFORMS = ("cuda", "rocm", "xpu", "cpu")
# torch's name of the device type on which a platform's tensors live.
DEVICE_TYPE = {"cuda": "cuda", "rocm": "cuda", "xpu": "xpu", "cpu": "cpu"}


@cache
def built_for_rocm() -> bool:
    """Whether this torch calls AMD GPUs 'cuda'."""
    import torch

    return torch.version.hip is not None


def platform_of(device: torch.device) -> str:
    """``cuda``, ``rocm``, ``xpu`` or ``cpu``; any other device type is its own platform, one without a row."""
    return "rocm" if device.type == "cuda" and built_for_rocm() else device.type


def check_platform(name: str, asked: str) -> str:
    """``name`` if it is a platform; PlatformError that shows how it was ``asked`` otherwise."""
    if name not in PLATFORMS:
        raise PlatformError(f"unknown platform '{name}' in {asked}{suggestion(name, PLATFORMS)}")
    return name
