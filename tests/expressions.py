"""Random expressions, and their value by torch's own functions: an evaluator that owes nothing to the providers."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from relu2ir.ir.expr import Call, Const, Expr, Name, fold
from relu2ir.ir.primitives import PRIMITIVES

NAMES = ("x", "y")
SPECIAL = (float("nan"), 0.0, -0.0, float("inf"), -float("inf"), 5e-324, -5e-324, 1.7976931348623157e308, 0.5, -3.0)

_VALUES = [name for name, row in PRIMITIVES.items() if not row.is_condition and name != "where"]
_CONDITIONS = [name for name, row in PRIMITIVES.items() if row.is_condition]


def torch_function(primitive: str) -> Callable[..., torch.Tensor]:
    module, _, name = PRIMITIVES[primitive].torch.rpartition(".")
    return getattr(importlib.import_module(module), name)


def evaluate(expr: Expr, values: dict[str, torch.Tensor]) -> torch.Tensor:
    """``expr`` over tensors of one dtype and shape, node by node."""
    like = next(iter(values.values()))

    def visit(node: Expr, args: list[torch.Tensor]) -> torch.Tensor:
        if isinstance(node, Name):
            return values[node.name]
        if isinstance(node, Const):
            return torch.full_like(like, node.value)
        assert isinstance(node, Call)
        return torch_function(node.primitive)(*args)

    return fold([expr], visit)[expr]


def expressions(constants: st.SearchStrategy[float]) -> st.SearchStrategy[Expr]:
    """Well-formed trees over `NAMES`: comparisons only as the first argument of where."""

    def extend(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
        def call(primitive: str) -> st.SearchStrategy[Expr]:
            args: list[Any] = [inner] * len(PRIMITIVES[primitive].args)
            if primitive == "where":
                compare = st.builds(Call, st.sampled_from(_CONDITIONS), st.tuples(inner, inner))
                args = [compare, inner, inner]
            return st.builds(functools.partial(Call, primitive), st.tuples(*args))

        return st.sampled_from([*_VALUES, "where"]).flatmap(call)

    leaves = st.sampled_from(NAMES).map(Name) | constants.map(Const)
    return st.recursive(leaves, extend, max_leaves=12)
