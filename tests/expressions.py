"""Random expressions, and values at which operations turn."""

from __future__ import annotations

import functools
from typing import Any

from hypothesis import strategies as st

from relu2ir.ir.expr import Call, Const, Expr, Name
from relu2ir.ir.primitives import PRIMITIVES

NAMES = ("x", "y")
SPECIAL = (float("nan"), 0.0, -0.0, float("inf"), -float("inf"), 5e-324, -5e-324, 1.7976931348623157e308, 0.5, -3.0)

_VALUES = [name for name, row in PRIMITIVES.items() if not row.is_condition and name != "where"]
_CONDITIONS = [name for name, row in PRIMITIVES.items() if row.is_condition]


def expressions(constants: st.SearchStrategy[float]) -> st.SearchStrategy[Expr]:
    """Well-formed trees over `NAMES`: comparisons only as the first argument of where."""

    def extend(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
        def call(primitive: str) -> st.SearchStrategy[Expr]:
            row = PRIMITIVES[primitive]
            args: list[Any] = [constants.map(Const) if name in row.numbers else inner for name in row.args]
            if primitive == "where":
                compare = st.builds(Call, st.sampled_from(_CONDITIONS), st.tuples(inner, inner))
                args = [compare, inner, inner]
            return st.builds(functools.partial(Call, primitive), st.tuples(*args))

        return st.sampled_from([*_VALUES, "where"]).flatmap(call)

    leaves = st.sampled_from(NAMES).map(Name) | constants.map(Const)
    return st.recursive(leaves, extend, max_leaves=12)
