"""Triton: the functor of an op, written out as text, inside one of two hand-written loops (`triton_loops.py`)."""

from __future__ import annotations

import linecache
import math
import os
import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING, Any

from relu2ir.ir.emit import Target, emit
from relu2ir.ir.expr import OPERATORS
from relu2ir.layout import kernel_shape_problem, loops
from relu2ir.registry import Provider
from relu2ir.spec import Layout, OpSpec

if TYPE_CHECKING:
    import torch

# Functions of `triton_math.py`.
FUNCTIONS = ("div", "sqrt", "exp", "expm1", "log1p", "tanh", "erf", "erfc")
# tl.minimum, tl.maximum drop NaN; comparisons let it through. Triton's -x is 0 - x, which loses the sign of zero.
TEMPLATES = (
    {name: f"{{0}} {symbol} {{1}}" for name, (symbol, _) in OPERATORS.items()}
    | {name: f"{name}({{0}})" for name in FUNCTIONS}
    | dict.fromkeys(("minimum", "clamp_max"), "tl.where(({0} < {1}) | ({0} != {0}), {0}, {1})")
    | dict.fromkeys(("maximum", "clamp_min"), "tl.where(({0} > {1}) | ({0} != {0}), {0}, {1})")
    | {"neg": "{0} * -1.0", "where": "tl.where({0}, {1}, {2})", "div": "div({0}, {1})", "abs": "tl.abs({0})"}
    | {"square": "{0} * {0}", "relu": "tl.where({0} <= 0, 0.0, {0})"}
)


def _constant(value: float) -> str:
    # A bare Python float is float32 where no operator gives it the other side's type; tl.full drops the sign of zero.
    if value == 0 and math.copysign(1.0, value) < 0:
        return "(tl.full((), 0.0, T) * -1.0)"
    return f"tl.full((), {value!r}, T)" if math.isfinite(value) else f'tl.full((), float("{value}"), T)'


TARGET = Target("triton", TEMPLATES, _constant, "    {name} = {value}")

DTYPES = ("float16", "bfloat16", "float32", "float64")

# One 16-byte vector of a half type per thread: 1024 elements over 4 warps.
BLOCK, WARPS = 1024, 4
# Grid axes 1 and 2 stop here; axis 0 holds 2**31.
MAX_BLOCKS = 65_535


def source(spec: OpSpec) -> str:
    """The functor: ``T`` is the type in which it computes, ``params`` holds numbers, then comes one value per part.

    The scalars come last: a loop loads them apart.
    """
    statements, held = emit(spec.exprs, TARGET)
    ordered = sorted(spec.inputs, key=lambda input: input.layout is Layout.scalar)
    parts = [part for input in ordered for part in input.parts]
    arguments = ", ".join(["T: tl.constexpr", "params: tl.constexpr", *parts])
    functions = sorted(set(FUNCTIONS) & set(re.findall(r"(\w+)\(", "\n".join(statements))))
    lines = [
        "import triton",
        "import triton.language as tl",
        *([f"from relu2ir.providers.triton_math import {', '.join(functions)}"] if functions else []),
        "",
        "",
        "@triton.jit",
        f"def {_functor_name(spec)}({arguments}):",
        *(f"    {param} = tl.full((), params[{i}], T)" for i, param in enumerate(spec.params)),
        *statements,
        f"    return ({', '.join(held)},)",
        "",
    ]
    return "\n".join(lines)


def _functor_name(spec: OpSpec) -> str:
    # With the hash of the definition, which so is part of Triton's own cache key.
    return f"{spec.name}_{spec.hash}"


def functor(spec: OpSpec) -> Any:
    """The compiled text of `source`, a ``triton.jit`` function."""
    text, file = source(spec), f"<relu2ir triton {spec.qualname} {spec.hash}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # where Triton reads sources
    scope: dict[str, Any] = {"__name__": __name__}
    exec(compile(text, file, "exec"), scope)
    return scope[_functor_name(spec)]


def grid(rows: int, cols: int) -> tuple[tuple[int, int, int], int, int]:
    """The grid of the strided loop and its tile: blocks of columns, or several short rows where columns are few."""
    tile_cols = min(BLOCK, 1 << (cols - 1).bit_length())
    tile_rows = BLOCK // tile_cols
    blocks = -(-cols // tile_cols)
    folds = -(-blocks // MAX_BLOCKS)
    return (-(-rows // tile_rows), -(-blocks // folds), folds), tile_rows, tile_cols


def launcher(spec: OpSpec) -> Callable[..., Any]:
    """The kernel of ``spec``: tensors in order and then params in, one new tensor per output out. Records no gradient.

    Tensors agree in dtype, device and logical shape, or broadcast (`TRITON.refuses` says so of others); any strides.
    """
    import torch
    import triton.language as tl

    from relu2ir.providers import triton_loops

    body, count, allocate, returned = functor(spec), len(spec.inputs), allocator(spec), returner(spec)
    layouts = [input.layout for input in spec.inputs] + [output.layout for output in spec.outputs]
    each = [i for i in range(count) if layouts[i] is not Layout.scalar]
    once = [i for i in range(count) if layouts[i] is Layout.scalar]
    nest_of = lru_cache(maxsize=1024)(partial(loops, [layout for layout in layouts if layout is not Layout.scalar]))
    read, contiguous = len(spec.parts) - len(once), torch.contiguous_format
    options = {"num_warps": WARPS, "enable_fp_fusion": False}
    # The type in which each computes.
    types = {torch.float64: tl.float64} | dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), tl.float32)

    def run(tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], params: tuple[float, ...]) -> None:
        inputs, scalars = tuple([tensors[i] for i in each]), tuple([tensors[i] for i in once])
        operands = (*inputs, *outputs)
        nest = nest_of(tuple([(operand.shape, operand.stride()) for operand in operands]))
        if nest is None:
            dense = [out if out.is_contiguous() else torch.empty_like(out, memory_format=contiguous) for out in outputs]
            run([tensor.contiguous() for tensor in tensors], dense, params)
            for out, value in zip(outputs, dense):
                if value is not out:
                    out.copy_(value)
            return
        fixed = (params, types[outputs[0].dtype])
        if nest.flat:
            flat = triton_loops.flat[(-(-nest.cols // BLOCK),)]
            flat(body, inputs, scalars, operands[len(inputs) :], nest.cols, *fixed, BLOCK, **options)
            return
        parts = tuple((operands[p.operand], p.first, p.row_stride, p.col_stride) for p in nest.parts)
        size, *tile = grid(nest.rows, nest.cols)
        strided = triton_loops.strided[size]
        strided(body, parts[:read], scalars, parts[read:], nest.rows, nest.cols, *fixed, *tile, **options)

    def launch(*args: Any) -> Any:
        tensors, params = args[:count], args[count:]
        outputs = allocate(*tensors)
        if outputs[0].numel() > 0:
            device = outputs[0].get_device()
            if device < 0 or device == torch.cuda.current_device():
                run(tensors, outputs, params)
            else:
                with torch.cuda.device(device):
                    run(tensors, outputs, params)
        return returned(outputs)

    return launch


def allocator(spec: OpSpec) -> Callable[..., tuple[torch.Tensor, ...]]:
    """From the op's tensors to its empty outputs, strides kept as `torch.empty_like` keeps them.

    A plain output of a packed input is like that one's first part. An op in place has its input for an output.
    """
    import torch

    def of_first_part(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
        if tensor.is_contiguous():
            return tensor.new_empty((*tensor.shape[:-1], tensor.shape[-1] // 2))
        return torch.empty_like(tensor.chunk(2, -1)[0] if layout is Layout.halves else tensor[..., ::2])

    layouts = [(out.like, out.layout, spec.inputs[out.like].layout) for out in spec.outputs]
    makers = [
        (like, partial(of_first_part, layout=read) if read.packed and layout is Layout.plain else torch.empty_like)
        for like, layout, read in layouts
    ]

    def allocate(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensors[:1] if spec.writes_input else tuple([make(tensors[like]) for like, make in makers])

    return allocate


def returner(spec: OpSpec) -> Callable[[tuple[torch.Tensor, ...]], Any]:
    """What a kernel returns of its outputs: all, the only one, or nothing where that is its input."""
    if spec.writes_input:
        return lambda outputs: None
    return lambda outputs: outputs if len(outputs) > 1 else outputs[0]


_LOWERED: dict[str, tuple[OpSpec, Callable[..., Any], torch.library.Library]] = {}
_LOCK = Lock()


def lower(spec: OpSpec) -> Callable[..., Any]:
    """The kernel of ``spec`` for eager use; also registers it as ``<namespace>_triton::<name>.kernel`` for graphs.

    A spec that replaces another of the same name takes over its op.
    """
    with _LOCK:
        known = _LOWERED.get(spec.qualname)
        if known is not None and known[0] == spec:
            return known[1]
        launch = launcher(spec)
        if known is not None:
            known[2]._destroy()
        _LOWERED[spec.qualname] = spec, launch, _register(spec, launch)
        return launch


def _register(spec: OpSpec, launch: Callable[..., Any]) -> torch.library.Library:
    import torch

    allocate, returned, count = allocator(spec), returner(spec), len(spec.inputs)

    def meta(*args: Any) -> Any:
        return returned(allocate(*args[:count]))

    library = torch.library.Library(f"{spec.namespace}_triton", "FRAGMENT")
    library.define(spec.kernel_schema)
    for key in ("CUDA", "CPU") if interpreted() else ("CUDA",):
        library.impl(f"{spec.name}.kernel", launch, key)
    library.impl(f"{spec.name}.kernel", meta, "Meta")
    return library


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1), which also takes CPU tensors."""
    if "TRITON_INTERPRET" not in os.environ:
        return False  # without the cost of importing Triton
    import triton

    return triton.knobs.runtime.interpret


def _missing() -> str | None:
    import torch

    if find_spec("triton") is None:
        return "Triton is not installed; run pip install triton"
    if torch.cuda.is_available() or interpreted():
        return None
    return "no GPU was found (TRITON_INTERPRET=1 runs Triton kernels on the CPU, slowly, for tests)"


def _refuses(spec: OpSpec, tensors: Sequence[torch.Tensor]) -> str | None:
    first = tensors[0]
    devices = ("cuda", "cpu") if interpreted() else ("cuda",)
    dtype = str(first.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        return f"no kernel for {dtype}; it takes {', '.join(DTYPES)}"
    if first.device.type not in devices:
        return f"it runs on {' and '.join(devices)} tensors; found one on {first.device}"
    if any(tensor.dtype != first.dtype or tensor.device != first.device for tensor in tensors):
        return f"its tensors differ in dtype or device: {', '.join(f'{t.dtype} on {t.device}' for t in tensors)}"
    if dtype == "bfloat16" and interpreted():
        return "Triton's interpreter truncates float32 to bfloat16 instead of rounding"
    return kernel_shape_problem(spec, [tensor.shape for tensor in tensors])


TRITON = Provider("triton", missing=_missing, refuses=_refuses, lower=lower, source=source)
