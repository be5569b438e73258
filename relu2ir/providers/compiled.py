"""The compiled extension, ``relu2ir._C``: one binary that serves `CUDA` (on ROCm through HIP) and `CPP` (on the CPU).

The table below spells expressions in C++ for both. The extension is imported inside functions only: one that is
absent or does not load is a reason, never a crash.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from relu2ir.ir.emit import Target, emit, used_names
from relu2ir.ir.expr import OPERATORS
from relu2ir.layout import kernel_shape_problem
from relu2ir.registry import Provider
from relu2ir.spec import Layout, OpSpec
from relu2ir.specfile import DEFAULT_NAMESPACE

if TYPE_CHECKING:
    import torch

# C is the compute type: float for half types and float, double for double. A condition is a bool, so `auto`.
# fmin, fmax and the like drop NaN; comparisons let it through.
TEMPLATES = (
    {name: f"{{0}} {symbol} {{1}}" for name, (symbol, _) in OPERATORS.items()}
    | {name: f"std::{name}({{0}})" for name in ("abs", "sqrt", "exp", "expm1", "log1p", "tanh", "erf", "erfc")}
    | dict.fromkeys(("minimum", "clamp_max"), "{0} < {1} || {0} != {0} ? {0} : {1}")
    | dict.fromkeys(("maximum", "clamp_min"), "{0} > {1} || {0} != {0} ? {0} : {1}")
    | {"neg": "-{0}", "where": "{0} ? {1} : {2}", "square": "{0} * {0}", "relu": "{0} <= C(0) ? C(0) : {0}"}
)
TARGET = Target("c++", TEMPLATES, constant=lambda value: f"C({value!r})", statement="    const auto {name} = {value};")

# The element types of csrc/scalar.h and the dimensions of csrc/plan.h.
DTYPES = ("float16", "bfloat16", "float32", "float64")
MAX_DIMS = 16
_BETWEEN_TENSOR_AND_POINTER = ("unsafe_alloc_void_ptr_from_tensor", "alloc_tensor_by_stealing_from_void_ptr")


def functor(spec: OpSpec) -> str:
    """The op as a C++ struct: ``apply`` reads one scalar per part, writes one per output part."""
    used = used_names(spec.exprs)
    reads = [f"    const C {name} = in[{i}];" for i, name in enumerate(spec.parts) if name in used]
    reads += [f"    const C {name} = C(params[{i}]);" for i, name in enumerate(spec.params) if name in used]
    statements, held = emit(spec.exprs, TARGET)
    writes = [f"    out[{i}] = {value};" for i, value in enumerate(held)]
    params = "const double* params" if set(spec.params) & set(used) else "const double*"
    scalars = [part for input in spec.inputs if input.layout is Layout.scalar for part in input.parts]
    uniform = " || ".join(f"input == {spec.parts.index(name)}" for name in scalars)
    argument = "int input" if uniform else "int"
    lines = [
        f"// {_describe(spec)}",
        f"// definition {spec.hash}",
        f"struct {spec.name} {{",
        f"  static constexpr int inputs = {len(spec.parts)}, outputs = {len(held)}, params = {len(spec.params)};",
        f"  RELU2IR_HD static constexpr bool uniform({argument}) {{ return {uniform or 'false'}; }}",
        "  template <class C>",
        f"  RELU2IR_HD static void apply(const C* in, C* out, {params}) {{",
        *reads,
        *statements,
        *writes,
        "  }",
        "};",
    ]
    return "\n".join(lines) + "\n"


def _describe(spec: OpSpec) -> str:
    # Written out, a gradient may be far longer than its shared statements.
    return spec.formula if spec.forward is None else f"{spec.name}: the gradient of {spec.forward.formula}"


@cache
def load() -> tuple[Any, str | None]:
    """The extension and None, or None and why it is not here."""
    import torch  # noqa: F401  # the extension finds torch's libraries loaded

    try:
        return import_module("relu2ir._C"), None
    except ModuleNotFoundError:
        return None, "the extension was not built; run pip install . with a C++ compiler on PATH"
    except ImportError as error:
        return None, f"the extension does not load: {error}; run pip install . to build it anew"


def _missing_cpp() -> str | None:
    return load()[1]


def _missing_cuda() -> str | None:
    import torch

    extension, reason = load()
    if extension is None:
        return reason
    built, hip = extension.gpu(), torch.version.hip is not None
    if not built:
        return "the extension was built without nvcc; run pip install . with nvcc (or hipcc) on PATH"
    if not torch.cuda.is_available():
        cpu_only = torch.version.cuda is None and not hip
        return "this torch is CPU-only; install a torch with CUDA or ROCm" if cpu_only else "torch finds no GPU here"
    if hip != (built == "hip"):
        here = "ROCm" if hip else "CUDA"
        return f"the extension was built for {built}, this torch is for {here}; run pip install . with its compiler"
    return None


def _refuses(spec: OpSpec, tensors: Sequence[torch.Tensor], device: str) -> str | None:
    names = [input.name for input in spec.inputs]
    for name, tensor in zip(names, tensors):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.device.type != device:
            return f"{name} is on '{tensor.device.type}'; these kernels run on '{device}'"
        if dtype not in DTYPES:
            return f"{name} is {dtype}; the kernels take {', '.join(DTYPES)}"
        if tensor.dtype != tensors[0].dtype or tensor.device != tensors[0].device:
            return f"{name} and {names[0]} differ in dtype or device; give both the same"
        if len(tensor.shape) > MAX_DIMS:
            return f"{name} has {len(tensor.shape)} dimensions; the kernels take {MAX_DIMS}"
    return kernel_shape_problem(spec, [tensor.shape for tensor in tensors]) or _refuses_definition(spec)


def _refuses_definition(spec: OpSpec) -> str | None:
    """Whether this very op was compiled; an extension that is not here cannot tell, which `missing` says."""
    extension, _ = load()
    if extension is None:
        return None
    forward = spec.forward or spec
    compiled = extension.definitions()
    if spec.namespace != DEFAULT_NAMESPACE or forward.name not in compiled:
        return f"not compiled: {forward.qualname} is not in the extension; for an op of ops.yaml run pip install ."
    if compiled[forward.name] != forward.hash:
        return f"built from another definition of {forward.name}; run pip install ."
    return None


def _lower(spec: OpSpec, name: str) -> Callable[..., Any]:
    import torch

    extension, _ = load()
    # Without the dispatcher, through torch's two private functions where it has them; else without the overload's
    # Python layer: 0.95, 1.3 and 1.8 us a call.
    tensors = [getattr(torch._C._aoti, name, None) for name in _BETWEEN_TENSOR_AND_POINTER]
    kernel = extension.kernel(spec.name, name, *tensors) if all(tensors) else None
    return kernel or getattr(getattr(torch.ops, f"{spec.namespace}_{name}"), spec.name).kernel._op


CUDA = Provider("cuda", _missing_cuda, partial(_refuses, device="cuda"), partial(_lower, name="cuda"), functor)
CPP = Provider("cpp", _missing_cpp, partial(_refuses, device="cpu"), partial(_lower, name="cpp"), functor)
