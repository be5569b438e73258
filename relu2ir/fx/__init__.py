"""The FX pass: `fuse` raises what a user wrote to ops, `lower` turns ops into what the chosen provider runs.

`find` is the report of `fuse` alone.
"""

from relu2ir.fx.fuse import find, fuse
from relu2ir.fx.lower import lower

__all__ = ["find", "fuse", "lower"]
