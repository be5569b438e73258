"""The FX pass: `fuse` raises what a user wrote to ops, `lower` turns ops into what the chosen provider runs."""

from relu2ir.fx.fuse import fuse
from relu2ir.fx.lower import lower

__all__ = ["fuse", "lower"]
