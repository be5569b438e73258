"""The primitives that Triton has no operator for, as functions that functors call. Imports Triton: only they load it.

libdevice flushes float32 subnormals to zero in Triton, so where an argument or a result can be one, plain operations
compute it.
"""
# mypy: allow-untyped-defs

import math
from types import SimpleNamespace

import numpy
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime.interpreter import TensorHandle


def _by_numpy(function):
    """``function`` of an array as one of the interpreter's tensors, for which there is no libdevice."""
    return lambda x: tl.tensor(
        TensorHandle(function(x.handle.data).astype(x.handle.data.dtype), x.handle.dtype), x.type
    )


if triton.knobs.runtime.interpret:
    named = {name: getattr(numpy, name) for name in ("exp", "expm1", "log1p", "tanh")}
    named |= {name: numpy.vectorize(getattr(math, name), otypes=[float]) for name in ("erf", "erfc")}
    device = SimpleNamespace(**{name: _by_numpy(function) for name, function in named.items()})
else:
    device = libdevice


@triton.jit
def div(a, b):
    """Rounded to nearest: a plain float32 division compiles to one that is 2 ulp off."""
    if a.dtype == tl.float64:
        return a / b
    else:
        return tl.div_rn(a, b)


@triton.jit
def sqrt(x):
    """Rounded to nearest: a plain float32 root is approximate and flushes subnormals."""
    if x.dtype == tl.float64:
        return tl.sqrt(x)
    else:
        return tl.sqrt_rn(x)


@triton.jit
def exp(x):
    """Within 2 ulp: Triton's own float32 exp scales by log2(e) in one rounding and loses a digit or two far from 0.

    A subnormal result is the square of exp(x / 2).
    """
    if x.dtype == tl.float64:
        return device.exp(x)
    else:
        low = x < -80.0
        root = device.exp(tl.where(low, x * 0.5, x))
        return tl.where(low, root * root, root)


@triton.jit
def expm1(x):
    return tl.where(tl.abs(x) < 1e-20, x, device.expm1(x))


@triton.jit
def log1p(x):
    return tl.where(tl.abs(x) < 1e-20, x, device.log1p(x))


@triton.jit
def tanh(x):
    return tl.where(tl.abs(x) < 1e-20, x, device.tanh(x))


@triton.jit
def erf(x):
    return tl.where(tl.abs(x) < 1e-20, x * tl.full((), 1.1283791670955126, x.dtype), device.erf(x))


@triton.jit
def erfc(x):
    return device.erfc(x)
