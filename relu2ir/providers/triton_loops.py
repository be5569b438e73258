"""The two loops of the Triton provider. Imports Triton: only `triton.py` loads it.

A functor takes the compute type, the params and one value per part, scalars last, and returns a tuple of one value per
output part. Half types are loaded into float32 and rounded once, to nearest even, by the store.
"""
# mypy: allow-untyped-defs

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl


def _named(loop: str) -> Callable[[Any], str]:
    """Kernels carry the functor's name, so a profile tells one op from another."""
    return lambda specialization: f"{specialization.constants['functor'].__name__}_{loop}"


@triton.jit(repr=_named("flat"), do_not_specialize=("n",))
def flat(
    functor: tl.constexpr,
    inputs,
    scalars,
    outputs,
    n,
    numbers: tl.constexpr,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Dense operands as one run of ``n`` elements; ``inputs``, ``scalars`` and ``outputs`` are one pointer per part.

    ``numbers`` are the params' values (Triton's own launcher overwrites a kernel argument called params).
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    lane = tl.arange(0, BLOCK)
    once = tl.tuple([tl.load(pointer).to(T) for pointer in scalars])
    # Unless n is known to divide by 16 a mask makes every access scalar: only the last block pays for one.
    if start + BLOCK <= n:
        each = tl.tuple([tl.load(pointer + start + lane).to(T) for pointer in inputs])
        values = functor(T, numbers, *(each + once))
        for i in tl.static_range(len(outputs)):
            tl.store(outputs[i] + start + lane, values[i])
    else:
        mask = start + lane < n
        each = tl.tuple([tl.load(pointer + start + lane, mask).to(T) for pointer in inputs])
        values = functor(T, numbers, *(each + once))
        for i in tl.static_range(len(outputs)):
            tl.store(outputs[i] + start + lane, values[i], mask)


@triton.jit(repr=_named("strided"), do_not_specialize=("rows",))
def strided(
    functor: tl.constexpr,
    inputs,
    scalars,
    outputs,
    rows,
    cols,
    numbers: tl.constexpr,
    T: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Tiles of rows x columns; ``inputs`` and ``outputs`` are (pointer, first, row stride, column stride) per part.

    Offsets are 64-bit: a row's is one scalar per tile of one row, so the vectors cost nothing extra.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    block = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    col = block * COLS + tl.arange(0, COLS)[None, :]
    mask = (row < rows) & (col < cols)
    once = tl.tuple([tl.load(pointer).to(T) for pointer in scalars])
    each = tl.tuple([tl.load(pointers(part, row, col), mask).to(T) for part in inputs])
    values = functor(T, numbers, *(each + once))
    for i in tl.static_range(len(outputs)):
        tl.store(pointers(outputs[i], row, col), values[i], mask)


@triton.jit
def pointers(part, row, col):
    return part[0] + part[1] + row * part[2] + col * part[3]
