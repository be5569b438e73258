"""The Triton provider without a GPU: its text, what it compiles to for NVIDIA and AMD, what it refuses.

What it computes is in `triton_interpreted.py`, which the last test runs in a process of its own.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from relu2ir import specfile
from relu2ir.ir.expr import Call, Const, Name
from relu2ir.ir.primitives import PRIMITIVES
from relu2ir.layout import whole_shape
from relu2ir.providers import triton as provider
from relu2ir.registry import Imagined
from relu2ir.spec import Input, Layout, OpSpec, Output

triton = pytest.importorskip("triton")
triton_loops = pytest.importorskip("relu2ir.providers.triton_loops")
triton_math = pytest.importorskip("relu2ir.providers.triton_math")

pytestmark = pytest.mark.skipif(
    triton.knobs.runtime.interpret, reason="what is decorated under TRITON_INTERPRET cannot be compiled"
)

ROOT = Path(__file__).parents[1]
# Every op is put into the same two loops: one of a tensor and one of halves, with their gradients, stand for all.
OWN = [
    spec
    for op in specfile.read(ROOT / "ops.yaml").ops
    if op.name in ("relu_squared", "silu_and_mul")
    for spec in op.with_gradients
]
PACKED = next(spec for spec in OWN if spec.name == "silu_and_mul")
TARGETS = {"sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}


def declared(text):
    return specfile.read_text(f"namespace: compiled\nops: {{op: {text}}}").ops[0]


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """A function: the kernels that ``spec`` would launch on ``tensors``, compiled for the named target.

    Tensors lie on the CPU and nothing is launched; the rest is the path of a real call.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    def kernels(spec, *tensors, target="sm_90", fuse=False):
        class Driver:
            """What a launch asks of the driver. The device number keeps each target's kernels apart."""

            get_current_device = staticmethod(lambda: 1000 + list(TARGETS).index(target))
            get_current_stream = staticmethod(lambda device: 0)
            get_current_target = staticmethod(lambda: GPUTarget(*TARGETS[target]))

        class Compile:
            def __init__(self, loop):
                self.loop = loop

            def __getitem__(self, grid):
                return lambda *args, **kw: found.append(
                    self.loop.warmup(*args, grid=grid, **(kw | {"enable_fp_fusion": True} if fuse else kw))
                )

        found = []
        with monkeypatch.context() as patch:
            patch.setenv("TRITON_CACHE_DIR", str(tmp_path))
            for loop in ("flat", "strided"):
                patch.setattr(triton_loops, loop, Compile(getattr(triton_loops, loop)))
            patch.setattr(driver, "_active", Driver())
            provider.launcher(spec)(*tensors, *spec.params.values())
        return found

    return kernels


def text(kernel):
    return kernel.asm["ptx"] if "ptx" in kernel.asm else kernel.asm["amdgcn"]


def operands(spec, *shape, dtype=torch.bfloat16):
    return [torch.zeros(whole_shape(input.layout, shape), dtype=dtype) for input in spec.inputs]


def test_the_functions_of_templates_exist():
    assert set(PRIMITIVES) >= set(provider.FUNCTIONS)
    assert all(hasattr(triton_math, function) for function in provider.FUNCTIONS)


def test_the_functor_is_readable_and_named_by_the_definitions_hash():
    spec = declared("{inputs: [x, y], params: {limit: 7}, expr: relu(x) / y - limit}")
    assert provider.source(spec) == (
        "import triton\n"
        "import triton.language as tl\n"
        "from relu2ir.providers.triton_math import div\n"
        "\n"
        "\n"
        "@triton.jit\n"
        f"def op_{spec.hash}(T: tl.constexpr, params: tl.constexpr, x, y):\n"
        "    limit = tl.full((), params[0], T)\n"
        "    v0 = tl.where(x <= 0, 0.0, x)\n"
        "    v1 = div(v0, y)\n"
        "    v2 = v1 - limit\n"
        "    return (v2,)\n"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_every_primitive_compiles(compiled, target, dtype):
    x, y = Name("x"), Name("y")
    calls = []
    for name, row in PRIMITIVES.items():
        if row.is_condition:
            calls.append(Call("where", (Call(name, (x, y)), x, y)))
        elif name != "where":
            calls.append(Call(name, (x, *((Const(-1.0), Const(1.0)) if row.numbers else (y,)))[: len(row.args)]))
    inputs = Input("x", parts=("x",)), Input("y", parts=("y",))
    spec = OpSpec("compiled", "all", inputs, tuple(Output(f"out{i}", Layout.plain, (c,)) for i, c in enumerate(calls)))
    (kernel,) = compiled(spec, *operands(spec, 2048, dtype=dtype), target=target)
    assert len(re.findall(r"st\.global|buffer_store", text(kernel))) >= len(calls)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("spec", OWN, ids=lambda spec: spec.name)
def test_loads_and_stores_are_16_bytes_wide(compiled, spec, target):
    dtype = torch.bfloat16 if target == "sm_90" else torch.float32  # 256 threads of 4 elements on AMD
    (kernel,) = compiled(spec, *operands(spec, 8, 4096, dtype=dtype), target=target)
    wide = Counter(re.findall(r"(?:ld|st)\.global\.v4\.b32|buffer_(?:load|store)_dwordx4", text(kernel)))
    load, store = ("ld.global.v4.b32", "st.global.v4.b32") if target == "sm_90" else (
        "buffer_load_dwordx4", "buffer_store_dwordx4",
    )  # fmt: skip
    assert wide == {load: len(spec.parts), store: len(spec.exprs)}


@pytest.mark.parametrize(
    "place",
    [lambda x: x.flatten()[:-7], lambda x: x[:, :2048], lambda x: x[:1, :4000].expand(8, 4000)],
    ids=["odd size", "row slice", "expanded rows"],
)
def test_loads_stay_wide(compiled, place):
    """In the whole blocks of a dense run of any size; in rows that start at 16-byte boundaries."""
    (kernel,) = compiled(OWN[0], place(torch.zeros(8, 4096, dtype=torch.bfloat16)))
    assert text(kernel).count("ld.global.v4.b32") == text(kernel).count("st.global.v4.b32") == 1


def test_the_loads_of_a_single_packed_row_stay_wide(compiled):
    (kernel,) = compiled(PACKED, torch.zeros(1, 8192, dtype=torch.bfloat16))
    assert text(kernel).count("ld.global.v4.b32") == 2


BROADCASTING = {
    spec.name: spec
    for op in specfile.read(ROOT / "tests/matrix_ops.yaml").ops
    for spec in op.with_gradients
    if any(input.layout.broadcast for input in op.inputs)
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["biased", "biased_backward", "gated_by_column"])
def test_a_vector_is_read_in_whole_vectors(compiled, name, target):
    spec, dtype = BROADCASTING[name], torch.bfloat16 if target == "sm_90" else torch.float32
    (kernel,) = compiled(spec, *operands(spec, 8, 4096, dtype=dtype), target=target)
    assert kernel.name.endswith("_strided")
    wide = re.findall(r"ld\.global\.v4\.b32|buffer_load_dwordx4", text(kernel))
    assert len(wide) == len(spec.parts)


@pytest.mark.parametrize("name", ["leaning", "leaning_backward"])
def test_a_scalar_is_loaded_once_and_leaves_the_others_one_wide_run(compiled, name):
    spec = BROADCASTING[name]
    (kernel,) = compiled(spec, *operands(spec, 8, 4096))
    assert kernel.name.endswith("_flat")
    scalars = sum(input.layout is Layout.scalar for input in spec.inputs)
    # Not under a predicate, as the masked loads of the tail are.
    assert len(re.findall(r"(?m)^\s*ld\.global\.b16", text(kernel))) == scalars
    assert text(kernel).count("ld.global.v4.b32") == len(spec.parts) - scalars


def test_a_misaligned_base_is_read_in_place(compiled):
    (kernel,) = compiled(OWN[0], torch.zeros(4097, dtype=torch.bfloat16)[1:])
    assert "ld.global.b16" in text(kernel)
    assert "ld.global.v4" not in text(kernel)


def test_a_call_that_no_two_loops_serve_runs_on_copies(compiled):
    (kernel,) = compiled(OWN[0], torch.zeros(4, 8, 4096, dtype=torch.bfloat16)[:, :7, :64])
    assert kernel.name == f"relu_squared_{OWN[0].hash}_flat"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", OWN, ids=lambda spec: spec.name)
def test_no_operation_is_approximate_or_drops_nan(compiled, spec, dtype):
    (kernel,) = compiled(spec, *operands(spec, 8, 4096, dtype=dtype))
    assert not re.findall(r"div\.(?:full|approx)|(?:rcp|sqrt|rsqrt|lg2|tanh)\.approx", text(kernel))
    ttir = kernel.asm["ttir"]
    # Of float32 Triton's own are approximate; of float64 the root is sqrt.rn.
    assert not re.findall(r"math\.exp" if dtype == torch.float64 else r"math\.exp|math\.sqrt", ttir)
    assert not re.findall(r"arith\.(?:max|min)numf", ttir), "it drops NaN"
    if "silu" in spec.name:
        assert ("__nv_exp" if dtype == torch.float64 else "__nv_expf") in ttir
        assert ("div.rn.f64" if dtype == torch.float64 else "div.rn.f32") in text(kernel)


def test_a_root_is_rounded_to_nearest(compiled):
    spec = declared("{inputs: [x], expr: sqrt(x)}")
    for dtype, instruction in ((torch.float32, "sqrt.rn.f32"), (torch.float64, "sqrt.rn.f64")):
        (kernel,) = compiled(spec, torch.zeros(2048, dtype=dtype))
        assert set(re.findall(r"sqrt\.\S+", text(kernel))) == {instruction}


def test_no_multiplication_and_addition_are_contracted(compiled):
    spec = declared("{inputs: [x, y], expr: x * y + x}")
    tensors = operands(spec, 2048, dtype=torch.float32)
    (kernel,), (fused,) = compiled(spec, *tensors), compiled(spec, *tensors, fuse=True)
    assert "FFMA" in fused.asm["sass"], "the disassembly would show a contraction"
    assert "FFMA" not in kernel.asm["sass"]
    (kernel,), (fused,) = (compiled(spec, *tensors, target="gfx942", fuse=fuse) for fuse in (False, True))
    contraction = re.compile(r"v_(?:pk_)?(?:fma|fmac|mad)")
    assert contraction.search(text(fused))
    assert not contraction.search(text(kernel))


def test_float64_constants_and_params_keep_their_digits(compiled):
    (kernel,) = compiled(
        declared("{inputs: [x], params: {bias: 0.3}, expr: x * 1.702 + bias}"), torch.zeros(9).double()
    )
    assert "dense<1.702000e+00> : tensor<1024xf64>" in kernel.asm["ttir"]
    assert "dense<3.000000e-01> : tensor<1024xf64>" in kernel.asm["ttir"]


def test_two_definitions_of_one_name_share_no_kernel(compiled):
    one, other = (declared(f"{{inputs: [x], expr: {expr}}}") for expr in ("x + x", "square(x)"))
    again = declared("{inputs: [x], expr: x + x}")
    keys = [provider.functor(spec).cache_key for spec in (one, other, again)]
    assert keys[0] == keys[2], "a kernel on disk serves the next process"
    assert keys[0] != keys[1]
    kernels = [compiled(spec, torch.zeros(2048))[0] for spec in (one, other, again)]
    assert kernels[0].hash == kernels[2].hash != kernels[1].hash
    assert "mul.rn.f32" in text(kernels[1])
    assert "mul.rn.f32" not in text(kernels[0])


def test_a_params_value_is_part_of_its_kernel(compiled):
    spec = declared("{inputs: [x], params: {bias: 0.5}, expr: x + bias}")
    half, quarter = (
        compiled(OpSpec(spec.namespace, spec.name, spec.inputs, spec.outputs, {"bias": bias}), torch.zeros(2048))[0]
        for bias in (0.5, 0.25)
    )
    assert "0f3F000000" in text(half)
    assert "0f3E800000" in text(quarter)


def test_grids_cover_every_row_and_column_within_the_limits():
    for rows, cols in ((1, 1), (3, 5), (200_000, 8), (200_000, 3072), (7, 2**31 + 5), (2**31 + 5, 1), (1, 2**36)):
        (across, blocks, folds), tile_rows, tile_cols = provider.grid(rows, cols)
        assert across * tile_rows >= rows and (across - 1) * tile_rows < rows
        assert blocks * folds * tile_cols >= cols
        assert across < 2**31 and blocks <= 65_535 and folds <= 65_535
        assert tile_rows * tile_cols == 1024


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_it_is_missing_with_a_way_out():
    reason = "no GPU was found (TRITON_INTERPRET=1 runs Triton kernels on the CPU, slowly, for tests)"
    assert provider.TRITON.missing() == reason


def test_without_triton_it_is_missing_with_a_way_out(monkeypatch):
    monkeypatch.setattr(provider, "find_spec", lambda name: None)
    assert provider.TRITON.missing() == "Triton is not installed; run pip install triton"


@pytest.mark.parametrize(
    ("index", "tensors", "reason"),
    [
        (0, [((8,), torch.float16, "cuda")], None),
        (0, [((), torch.bfloat16, "cuda:1")], None),
        (3, [((2, 8), torch.float64, "cuda")], None),
        (0, [((8,), torch.int32, "cuda")], "no kernel for int32; it takes float16, bfloat16, float32, float64"),
        (0, [((8,), torch.float32, "cpu")], "it runs on cuda tensors; found one on cpu"),
        (3, [((8, 5), torch.float32, "cuda")],
         "it reads halves [gate, up] from the last dimension of 'x', which must be even; found shape [8, 5]. "
         "Pass both parts in one tensor."),
        (1, [((8,), torch.float32, "cuda"), ((4, 8), torch.float32, "cuda")],
         "its operands differ in shape: [8], [4, 8]"),
        (1, [((8,), torch.float32, "cuda"), ((8,), torch.float16, "cuda")],
         "its tensors differ in dtype or device: torch.float32 on cuda, torch.float16 on cuda"),
    ],
)  # fmt: skip
def test_what_it_refuses_and_why(index, tensors, reason):
    made = [Imagined(shape, dtype, torch.device(device)) for shape, dtype, device in tensors]
    assert provider.TRITON.refuses(OWN[index], made) == reason


def test_the_interpreted_kernels_compute_what_pytorch_computes():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/triton_interpreted.py"]
    ran = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    (passed,) = re.findall(r"(\d+) passed", ran.stdout)
    assert int(passed) > 150
    assert "skipped" not in ran.stdout
