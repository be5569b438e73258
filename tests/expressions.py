"""Random expressions, and values at which operations turn."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

from hypothesis import strategies as st

from relu2ir import specfile
from relu2ir.errors import SpecError
from relu2ir.ir.expr import Call, Const, Expr, Name, postorder
from relu2ir.ir.primitives import PRIMITIVES
from relu2ir.spec import OpSpec

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


def random_ops(count: int) -> list[OpSpec]:
    """Ops of random expressions over two inputs, the same at every run, that a spec file may declare."""
    return list(islice(_random_ops(random.Random(0)), count))


def _random_ops(rng: random.Random) -> Iterator[OpSpec]:
    for index in range(10_000):
        expr = _random_expr(rng, 4)
        text = f"namespace: random\nops: {{op{index}: {{inputs: [x, y], expr: '{expr}'}}}}"
        calls = [node for node in postorder([expr]) if isinstance(node, Call)]
        if len(calls) > 2:
            try:
                yield from specfile.read_text(text).ops
            except SpecError:  # reads one input only, or a call reads none
                continue


def _random_expr(rng: random.Random, levels: int) -> Expr:
    def leaf() -> Expr:
        return Name(rng.choice(NAMES)) if rng.random() < 0.75 else Const(rng.choice([0.5, 2.0, -1.25, 0.1, 3.0]))

    if levels == 0 or rng.random() < 0.1:
        return leaf()
    primitive = rng.choice([*_VALUES, "where"])
    row = PRIMITIVES[primitive]
    args = [leaf() if name in row.numbers else _random_expr(rng, levels - 1) for name in row.args]
    if primitive == "where":  # of inputs as they are: a rounding that flips a choice is no error
        args[0] = Call(rng.choice(_CONDITIONS), (Name("x"), leaf()))
    return Call(primitive, tuple(args))
