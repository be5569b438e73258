"""The C++ and CUDA sources: they compile for every architecture, read and write whole vectors, agree with torch's
headers, and the built binary plans every layout rightly."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from requirements import tool

from relu2ir import codegen, specfile
from relu2ir.ir.emit import used_names
from relu2ir.registry import PROVIDERS
from relu2ir.spec import Layout

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "csrc"
OPS = {spec.name: spec for spec in specfile.read(ROOT / "ops.yaml").ops}
MATRIX = {spec.name: spec for spec in specfile.read(ROOT / "tests/matrix_ops.yaml").ops}
# A multiplication and an addition that may not become one operation.
POLYNOMIAL = specfile.read_text("ops: {polynomial: {inputs: [x], expr: x * x + x}}").ops[0]


def sources(folder: Path, *specs: codegen.OpSpec) -> list[Path]:
    """The generated files in ``folder``; those to be compiled."""
    files = codegen.generate(specs, gpu=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return [folder / name for name in files if name.endswith(".cu")]


def compiled(command: list[str | Path | None], **environment: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


def ptx(folder: Path, source: Path, arch: str) -> dict[str, str]:
    """The PTX of each kernel by its mangled name, after ptxas has taken it for ``arch``."""
    command = [tool("nvcc"), "-std=c++17", "-O3", "--fmad=false", f"-arch=sm_{arch}", f"-I{CSRC}", f"-I{folder}"]
    compiled([*command, "-cubin", "--keep", "--keep-dir", folder, source, "-o", folder / f"sm_{arch}.cubin"])
    text = (folder / f"{source.stem}.ptx").read_text()
    return {re.match(r"\w+", part)[0]: part for part in text.split(".entry ")[1:]}  # type: ignore[index]


@pytest.mark.needs("nvcc")
@pytest.mark.parametrize(
    ("arch", "op"),
    [
        ("80", OPS["relu_squared"]),
        ("90", OPS["silu_and_mul"]),
        ("90", MATRIX["biased"]),
        ("90", MATRIX["scaled_pairs"]),
        ("100", OPS["relu_squared"]),
    ],
    ids=lambda case: case if isinstance(case, str) else case.name,
)
def test_kernels_read_and_write_whole_vectors(arch: str, op: codegen.OpSpec, tmp_path: Path) -> None:
    """A vector input is read so too, where it lies in rows; a scalar is one load beside them."""
    kernels = ptx(tmp_path, sources(tmp_path, op)[0], arch)
    for spec in op.with_gradients:
        read = set(used_names(spec.exprs))
        scalars = sum(input.layout is Layout.scalar and input.name in read for input in spec.inputs)
        each = len(read.intersection(spec.parts)) - scalars
        mine = {name: text for name, text in kernels.items() if f"{len(spec.name)}{spec.name}E" in name}
        # In each of four types: flat, and rows in aligned vectors, in vectors from anywhere on, of single elements.
        assert len(mine) == 16
        for name, text in mine.items():
            single, anywhere = "AccessE2" in name, "AccessE1" in name
            wide = len(re.findall(r"ld\.global\.(v4\.\w32|v2\.\w64)", text))
            # From anywhere on a second one holds the rest.
            assert wide == (0 if single else 2 * each if anywhere else each), name
            if "4flat" in name:  # before it branches to a vector or a tail; again in neither
                loads = re.findall(r"ld\.global\.(?:nc\.)?[uf]\d+|bra", text)
                assert loads.index("bra") == scalars, name
                assert (len(loads) - loads.count("bra") - scalars) % each == 0, name
            assert len(re.findall(r"st\.global\.v4\.b32", text)) == (0 if single else len(spec.exprs)), name


@pytest.mark.needs("nvcc")
def test_a_multiplication_and_an_addition_stay_two(tmp_path: Path) -> None:
    for name, text in ptx(tmp_path, sources(tmp_path, POLYNOMIAL)[0], "90").items():
        assert "fma" not in text, name


@pytest.mark.needs("hipcc")
def test_the_same_sources_compile_for_amd_gpus(tmp_path: Path) -> None:
    command = [tool("hipcc"), "-x", "hip", "--offload-arch=gfx90a", "-std=c++17", "-O3", "-ffp-contract=off", "-fPIC"]
    # One op of each layout: all of them take 107 s.
    for source in sources(
        tmp_path, *(OPS[name] for name in ("gelu_and_mul", "swigluoai_and_mul", "xielu", "bias_gelu"))
    ):
        compiled([*command, f"-I{CSRC}", f"-I{tmp_path}", "-c", source, "-o", tmp_path / "hip.o"], HIP_PLATFORM="amd")


@pytest.mark.needs("cxx")
def test_the_declared_functions_are_those_of_torch(tmp_path: Path) -> None:
    """Each one as its header has it, under the interface of torch 2.10, the oldest that is supported."""
    shim = re.sub(r"//.*", "", (CSRC / "torch_shim.h").read_text())
    declared = re.findall(r"([\w:]+\*?)\s+((?:aoti_)?torch_\w+)\(([^;]*)\);", shim)
    assert [name for _, name, _ in declared] == re.findall(r"((?:aoti_)?torch_\w+)\(", shim)
    checks = "".join(
        f"static_assert(std::is_same_v<decltype({name}), {ret}({args})>);\n" for ret, name, args in declared
    )
    types = "".join(re.findall(r"using \w+ = [^;]*;\n|struct \w+;\n", shim))
    (tmp_path / "shim.cpp").write_text(
        "#define USE_CUDA\n#define TORCH_TARGET_VERSION 0x020a000000000000\n#include <cstdint>\n"
        f"constexpr uint64_t {re.search('TORCH_SHIM_VERSION = [^;]*;', shim)[0]}\n"  # type: ignore[index]
        "#include <torch/csrc/stable/c/shim.h>\n#include <type_traits>\n"
        f"static_assert(TORCH_SHIM_VERSION == TORCH_VERSION_2_10_0);\n{types}{checks}"
    )
    include = Path(torch.__file__).parent / "include"
    compiled([tool("cxx"), "-std=c++20", "-fsyntax-only", f"-I{include}", tmp_path / "shim.cpp"])


@pytest.fixture(scope="module")
def binary() -> Path:
    from relu2ir import _C

    return Path(_C.__file__)


@pytest.mark.needs("cpp")
def test_the_binary_asks_for_torch_and_for_no_cuda_library(binary: Path) -> None:
    """Without libtorch among what it needs, the CUDA symbol would stay null beside a torch that has it."""
    needed = subprocess.run(["readelf", "-d", binary], capture_output=True, text=True, check=True).stdout
    libraries = re.findall(r"NEEDED.*\[(.*)\]", needed)
    assert {"libtorch.so", "libtorch_cpu.so"} <= set(libraries)
    assert not [name for name in libraries if "cuda" in name]


@pytest.mark.needs("cpp")
def test_the_one_symbol_of_torch_with_cuda_is_weak(binary: Path) -> None:
    from relu2ir import _C

    if not _C.gpu():
        pytest.skip("the extension was built without a GPU compiler")
    symbols = subprocess.run(["readelf", "-W", "--dyn-syms", binary], capture_output=True, text=True, check=True).stdout
    (row,) = [line.split() for line in symbols.splitlines() if line.endswith("aoti_torch_get_current_cuda_stream")]
    assert row[4] == "WEAK" and row[6] == "UND"


def raw(name: str) -> torch._ops.OpOverload:
    PROVIDERS["cpp"].lower(OPS[name.removesuffix("_backward")])  # loads the extension
    return getattr(torch.ops.relu2ir_cpp, name).kernel


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """Up to five dimensions: permuted, sliced, stepped, expanded, empty, at any offset."""
    sizes = draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 4, 5, 8]), max_size=5))
    steps = [draw(st.sampled_from([1, 1, 1, 2, 3])) for _ in sizes]
    order = draw(st.permutations(range(len(sizes))))
    expanded = [draw(st.integers(0, 5)) == 0 for _ in sizes]
    offset = draw(st.integers(0, 3))
    strides, span = [0] * len(sizes), 1
    for d in order:
        strides[d] = 0 if expanded[d] else span * steps[d]
        if not expanded[d]:
            span *= max(sizes[d], 1) * steps[d]
    return torch.randn(span + offset).as_strided(sizes, strides, offset)


@pytest.mark.needs("cpp")
@hypothesis.given(x=views(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_any_strides_give_the_values_and_strides_of_torch(x: torch.Tensor, dtype: torch.dtype) -> None:
    x = x.to(dtype) if dtype != x.dtype and 0 not in x.stride() else x
    y = raw("relu_squared")(x)
    assert torch.equal(y, torch.square(torch.relu(x)))
    assert y.stride() == torch.empty_like(x).stride()


@pytest.mark.needs("cpp")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [511, 512, 513, 1100])
def test_rows_longer_than_a_block_are_done_to_the_end(dtype: torch.dtype, columns: int) -> None:
    """As they lie, in every second column, and with two operands that lie differently."""
    whole = torch.randn(3, 2 * columns).to(dtype)
    for x in (whole[:, :columns], whole[:, ::2]):
        assert torch.equal(raw("relu_squared")(x), torch.square(torch.relu(x)))
        result = raw("relu_mul")(x, whole[:, 1::2])
        assert torch.equal(
            result,
            (torch.relu(x).float() * whole[:, 1::2].float()).to(dtype)
            if dtype.itemsize == 2
            else torch.relu(x) * whole[:, 1::2],
        )


@pytest.mark.needs("cpp")
@pytest.mark.parametrize("offset", [0, 1])
def test_results_of_huge_pages_hold_the_values(offset: int) -> None:
    x = torch.randn((8 << 20) // 4 + 3)[offset:]
    assert torch.equal(raw("relu_squared")(x), torch.square(torch.relu(x)))


@pytest.mark.needs("cpp")
@hypothesis.given(x=views(), reverse=st.booleans())
def test_operands_may_be_strided_against_each_other(x: torch.Tensor, reverse: bool) -> None:
    grad = torch.randn(x.shape[::-1]).permute(tuple(reversed(range(x.dim())))) if reverse else torch.ones_like(x)
    result = raw("relu_squared_backward")(grad, x)
    assert torch.equal(result, torch.where(x <= 0, 0, grad * (2 * x)))
    assert result.stride() == torch.empty_like(x).stride()


@pytest.mark.needs("cpp")
@hypothesis.given(x=views())
def test_packed_halves_are_read_and_their_gradient_written_in_place(x: torch.Tensor) -> None:
    x = torch.cat([x, x], -1) if x.dim() else torch.randn(2)
    gate, up = x.chunk(2, -1)
    y = raw("silu_and_mul")(x)
    torch.testing.assert_close(y, torch.nn.functional.silu(gate) * up)
    assert y.stride() == torch.empty_like(gate).stride()
    leaf = x.detach().clone().requires_grad_()
    gate, up = leaf.chunk(2, -1)
    (torch.nn.functional.silu(gate) * up).sum().backward()
    gradient = raw("silu_and_mul_backward")(torch.ones_like(y), x)
    torch.testing.assert_close(gradient, leaf.grad)
    assert gradient.stride() == torch.empty_like(x).stride()


@pytest.mark.needs("cpp")
def test_fake_tensors_have_the_real_strides() -> None:
    from torch._subclasses import FakeTensorMode

    whole, mode = torch.randn(4, 6, 8), FakeTensorMode()
    for x in (whole, whole.transpose(0, 1), whole.permute(2, 0, 1), whole[:, ::2], whole[..., :4]):
        halves = x.shape[:-1] + (x.shape[-1] // 2,)
        for name, args in {"silu_and_mul": [x], "silu_and_mul_backward": [torch.ones(halves), x]}.items():
            with mode:
                fake = raw(name)(*(mode.from_tensor(arg) for arg in args))
            real = raw(name)(*args)
            assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.needs("cpp")
def test_sizes_may_be_symbolic() -> None:
    seen = []

    def backend(graph: torch.fx.GraphModule, inputs: list[object]) -> object:
        seen.append(graph)
        return graph

    op = raw("silu_and_mul")
    function = torch.compile(lambda x: op(x), backend=backend, dynamic=True, fullgraph=True)
    for shape in ((4, 8), (5, 10)):
        x = torch.randn(shape)
        assert torch.equal(function(x), op(x))
    assert len(seen) == 1


@pytest.mark.needs("cpp")
@pytest.mark.parametrize(
    ("op", "args", "message"),
    [
        ("silu_and_mul", [torch.ones(3)], "the last dimension of a packed tensor must be even"),
        ("silu_and_mul", [torch.tensor(1.0)], "the last dimension of a packed tensor must be even"),
        ("relu_squared_backward", [torch.ones(3), torch.ones(4)], "tensors differ in size"),
        ("relu_squared_backward", [torch.ones(3), torch.ones(3).double()], "tensors differ in dtype or device"),
        ("relu_squared", [torch.arange(3)], "the kernels take float16, bfloat16, float32 and float64"),
        ("relu_squared", [torch.ones([1] * 17)], "a tensor has 17 dimensions; at most 16 are supported"),
    ],
)
def test_a_call_that_no_kernel_takes_raises(op: str, args: list[torch.Tensor], message: str) -> None:
    """The provider refuses these before; this is the last line of defence."""
    with pytest.raises(RuntimeError, match=message):
        raw(op)(*args)
