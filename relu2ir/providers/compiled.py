"""The compiled kernels: `CUDA` (on ROCm through HIP) and `CPP` (on the CPU), both of one binary.

The library's ops are in the extension ``relu2ir._C``, those of a user's spec file in a binary that ``relu2ir build``
made. The table below spells expressions in C++. A binary is imported inside functions only: one that is absent or does
not load is a reason, never a crash.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from relu2ir import binaries
from relu2ir.errors import BuildError
from relu2ir.ir.emit import Target, emit, used_names
from relu2ir.ir.expr import OPERATORS
from relu2ir.layout import kernel_shape_problem
from relu2ir.registry import Provider
from relu2ir.spec import Layout, OpSpec

if TYPE_CHECKING:
    import torch

# C is the compute type: float for half types and float, double for double; M has the functions. A condition is a bool,
# so `auto`. fmin, fmax and the like drop NaN; comparisons let it through. NaN is asked of the bound, which varies less:
# asked of what it bounds, GCC vectorises no clamp.
TEMPLATES = (
    {name: f"{{0}} {symbol} {{1}}" for name, (symbol, _) in OPERATORS.items()}
    | {name: f"std::{name}({{0}})" for name in ("abs", "sqrt")}
    | {name: f"M::{name}({{0}})" for name in ("exp", "expm1", "log1p", "tanh", "erf", "erfc", "sigmoid")}
    | dict.fromkeys(("minimum", "clamp_max"), "{1} < {0} ? {1} : {1} != {1} ? {1} : {0}")
    | dict.fromkeys(("maximum", "clamp_min"), "{1} > {0} ? {1} : {1} != {1} ? {1} : {0}")
    | {"neg": "-{0}", "where": "{0} ? {1} : {2}", "square": "{0} * {0}", "relu": "{0} <= C(0) ? C(0) : {0}"}
)
TARGET = Target("c++", TEMPLATES, constant=lambda value: f"C({value!r})", statement="    const auto {name} = {value};")

# The element types of csrc/scalar.h and the dimensions of csrc/plan.h.
DTYPES = ("float16", "bfloat16", "float32", "float64")
MAX_DIMS = 16
_lock = Lock()
_holders: dict[tuple[str, str], tuple[Any, str | None]] = {}
_registered: set[str] = set()
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
    layouts = [*(input.layout for input in spec.inputs), *(output.layout for output in spec.outputs)]
    begins = accumulate((2 if layout.packed else 1 for layout in layouts), initial=0)
    paired = " || ".join(f"operand == {at}" for at, layout in zip(begins, layouts) if layout is Layout.pairs)
    paired_argument = "int operand" if paired else "int"
    lines = [
        f"// {_describe(spec)}",
        f"// definition {spec.hash}",
        f"struct {spec.name} {{",
        f"  static constexpr int inputs = {len(spec.parts)}, outputs = {len(held)}, params = {len(spec.params)};",
        f"  RELU2IR_HD static constexpr bool uniform({argument}) {{ return {uniform or 'false'}; }}",
        f"  RELU2IR_HD static constexpr bool paired({paired_argument}) {{ return {paired or 'false'}; }}",
        "  template <class M = Elementary<false>, class C>",
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


def identity(spec: OpSpec) -> str:
    """What tells the kernels of a forward op from those of another definition, or of another text for the same one."""
    return binaries.digest(*map(functor, spec.with_gradients))


@cache
def load() -> tuple[Any, str | None]:
    """The extension and None, or None and why it is not here."""
    import torch  # noqa: F401  # the extension finds torch's libraries loaded

    try:
        extension = import_module("relu2ir._C")
        stale = "the extension was built by another version; run pip install . to build it anew"
        return (extension, None) if hasattr(extension, "register_op") else (None, stale)
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
    return kernel_shape_problem(spec, [tensor.shape for tensor in tensors]) or _refuses_definition(spec, device)


def _refuses_definition(spec: OpSpec, device: str) -> str | None:
    """Whether this very op was compiled; without an extension nothing can tell, which `missing` says."""
    import torch

    extension, _ = load()
    if extension is None:
        return None
    held, reason = _holder(spec.forward or spec)
    if held is not None and held is not extension and device == "cuda":
        hip = torch.version.hip is not None
        if held.gpu() != ("hip" if hip else "cuda"):
            return f"built without {'hipcc' if hip else 'nvcc'}; put it on PATH and run relu2ir build {spec.file}"
    return reason


def _holder(forward: OpSpec) -> tuple[Any, str | None]:
    """The extension or binary that holds ``forward`` and its gradient, registered with torch; or None and why not."""
    key = (forward.qualname, forward.hash)
    with _lock:
        if key not in _holders:
            _holders[key] = _find(forward)
            if _holders[key][0] is not None:
                _register(_holders[key][0], forward)
        return _holders[key]


def forget() -> None:
    """Look again for the binaries of users' ops: one may have been built."""
    with _lock:
        _holders.clear()


def _find(forward: OpSpec) -> tuple[Any, str | None]:
    extension, _ = load()
    compiled = extension.definitions()
    if compiled.get(forward.qualname) == forward.hash:
        return extension, None
    if Path(forward.file) == binaries.shipped("ops.yaml"):
        return None, f"built from another definition of {forward.name}; run pip install ."
    try:
        path = binaries.find(forward.qualname, identity(forward))
        if path is not None:
            return _load_binary(path), None
        reason = f"not compiled: {forward.qualname} is in no binary"
    except (BuildError, ImportError) as error:
        reason = str(error)
    return None, f"{reason}; run relu2ir build {forward.file}"


@cache
def _load_binary(path: Path) -> Any:
    """The module of a binary that `binaries.find` found."""
    import torch  # noqa: F401  # the binary finds torch's libraries loaded

    # The last word of the name tells Python what to call in it.
    loader = ExtensionFileLoader(f"relu2ir_{path.parent.name}._C", str(path))
    module = module_from_spec(ModuleSpec(loader.name, loader, origin=str(path)))
    loader.exec_module(module)
    return module


def _register(holder: Any, forward: OpSpec) -> None:
    """Make torch know the kernels. Once per name: an op may come in a further binary, beside others or for the GPU."""
    for op in filter(None, [*forward.with_gradients, forward.in_place]):
        for provider in ("cpp", "cuda"):
            name = f"{op.qualname} {provider}"
            if name not in _registered and holder.register_op(op.name, provider):
                _registered.add(name)


def _lower(spec: OpSpec, name: str) -> Callable[..., Any]:
    import torch

    extension, _ = _holder(spec.forward or spec)
    # Without the dispatcher, through torch's two private functions where it has them; else without the overload's
    # Python layer: 0.95, 1.3 and 1.8 us a call.
    tensors = [getattr(torch._C._aoti, name, None) for name in _BETWEEN_TENSOR_AND_POINTER]
    kernel = extension.kernel(spec.name, name, *tensors) if all(tensors) else None
    return kernel or getattr(getattr(torch.ops, f"{spec.namespace}_{name}"), spec.name).kernel._op


CUDA = Provider("cuda", _missing_cuda, partial(_refuses, device="cuda"), partial(_lower, name="cuda"), functor)
CPP = Provider("cpp", _missing_cpp, partial(_refuses, device="cpu"), partial(_lower, name="cpp"), functor)
