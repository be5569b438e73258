"""Generated C++: what it says, and what its functors compute when the host's compiler compiles them."""

from __future__ import annotations

import ctypes
import itertools
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from expressions import random_ops
from requirements import tool

from relu2ir import codegen, specfile
from relu2ir.ir.primitives import PRIMITIVES
from relu2ir.oracle import mismatches
from relu2ir.spec import Layout, OpSpec

ROOT = Path(__file__).parent.parent
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # in the order of csrc/scalar.h
BINARY = {"add": "a + b", "sub": "a - b", "mul": "a * b", "div": "a / b"} | {
    name: f"{name}(a, b)" for name in ("minimum", "maximum", "clamp_min", "clamp_max")
}
CONDITIONS = {"lt": "a < b", "le": "a <= b", "gt": "a > b", "ge": "a >= b"}
FUNCTIONS = [name for name, row in PRIMITIVES.items() if len(row.args) == 1 and name != "neg"]
# An op for each primitive; `where` is in those for conditions.
VOCABULARY = (
    "namespace: vocabulary\nops:\n  op_neg: {inputs: [x], expr: -x}\n"
    "  op_clamp: {inputs: [x], expr: 'clamp(x, -0.5, 1.25)'}\n"
    + "".join(
        [f"  op_{name}: {{inputs: [x], expr: 2 * {name}(x)}}\n" for name in FUNCTIONS]
        + [f"  op_{name}: {{inputs: [a, b], expr: '{text}'}}\n" for name, text in BINARY.items()]
        + [f"  op_{name}: {{inputs: [a, b], expr: 'where({text}, a, 3 * b)'}}\n" for name, text in CONDITIONS.items()]
    )
)
# Random expressions, which together use every primitive.
RANDOM = random_ops(40)


def elementwise(spec: OpSpec) -> OpSpec:
    """The op with every input in full: a functor sees one value of each, however they are broadcast."""
    inputs = [replace(input, layout=Layout.plain) if input.layout.broadcast else input for input in spec.inputs]
    return replace(spec, inputs=tuple(inputs))


FORWARD = [
    elementwise(op)
    for file in (
        specfile.read(ROOT / "ops.yaml"),
        specfile.read(ROOT / "tests/matrix_ops.yaml"),
        specfile.read_text(VOCABULARY),
    )
    for op in file.ops
] + RANDOM
SPECS = [op for spec in FORWARD for op in spec.with_gradients]

RELU_SQUARED = """\
// relu_squared(x) = square(relu(x))
// definition {hash}
struct relu_squared {{
  static constexpr int inputs = 1, outputs = 1, params = 0;
  RELU2IR_HD static constexpr bool uniform(int) {{ return false; }}
  RELU2IR_HD static constexpr bool paired(int) {{ return false; }}
  template <class M = Elementary<false>, class C>
  RELU2IR_HD static void apply(const C* in, C* out, const double*) {{
    const C x = in[0];
    const auto v0 = x <= C(0) ? C(0) : x;
    const auto v1 = v0 * v0;
    out[0] = v1;
  }}
}};
"""
LIMITED = """\
// limited(gate, up, limit) = where(gate > limit, limit, gate) * up
// definition {hash}
struct limited {{
  static constexpr int inputs = 2, outputs = 1, params = 1;
  RELU2IR_HD static constexpr bool uniform(int) {{ return false; }}
  RELU2IR_HD static constexpr bool paired(int operand) {{ return operand == 0; }}
  template <class M = Elementary<false>, class C>
  RELU2IR_HD static void apply(const C* in, C* out, const double* params) {{
    const C gate = in[0];
    const C up = in[1];
    const C limit = C(params[0]);
    const auto v0 = gate > limit;
    const auto v1 = v0 ? limit : gate;
    const auto v2 = v1 * up;
    out[0] = v2;
  }}
}};
"""


def limited() -> OpSpec:
    expr = "where(gate > limit, limit, gate) * up"
    inputs = "{x: {pairs: [gate, up]}}"
    return specfile.read_text(f"ops: {{limited: {{inputs: {inputs}, params: {{limit: 7.0}}, expr: '{expr}'}}}}").ops[0]


def test_a_functor_reads_as_its_formula() -> None:
    relu_squared = next(spec for spec in SPECS if spec.name == "relu_squared")
    assert codegen.functor(relu_squared) == RELU_SQUARED.format(hash=relu_squared.hash)
    assert codegen.functor(limited()) == LIMITED.format(hash=limited().hash)


def test_a_gradient_that_reads_no_input_mentions_none() -> None:
    spec = specfile.read_text("ops: {doubled: {inputs: [x], expr: x + x}}").ops[0]
    text = codegen.functor(spec.backward)
    assert "const C grad = in[0];" in text and "in[1]" not in text


def test_bindings_say_how_tensors_lie_and_what_they_were_built_from() -> None:
    spec = limited()
    files = codegen.generate([spec], gpu=False)
    text = files["limited_cpu.cpp"]
    assert '"limited.kernel(Tensor x, float limit) -> Tensor"' in text
    assert '"limited_backward.kernel(Tensor grad, Tensor x, float limit) -> Tensor"' in text
    assert "inputs[] = {Layout::plain, Layout::pairs};" in text and "outputs[] = {{Layout::pairs, 1}};" in text
    assert f'{{"relu2ir::limited", "{spec.hash}"}}' in files["bindings.h"]


def test_two_inputs_give_two_gradients_each_like_its_input() -> None:
    spec = specfile.read_text("ops: {product: {inputs: [a, b], expr: a * b}}").ops[0]
    text = codegen.generate([spec], gpu=False)["product_cpu.cpp"]
    assert '"product_backward.kernel(Tensor grad, Tensor a, Tensor b) -> (Tensor, Tensor)"' in text
    assert "outputs[] = {{Layout::plain, 1}, {Layout::plain, 2}};" in text


def test_inputs_that_broadcast_are_told_to_the_loops_and_their_gradients_are_like_the_op() -> None:
    spec = specfile.read_text("ops: {f: {inputs: {x: , bias: vector, scale: scalar}, expr: x * scale + bias}}").ops[0]
    files = codegen.generate([spec], gpu=False)
    assert "inputs[] = {Layout::plain, Layout::vector, Layout::scalar};" in files["f_cpu.cpp"]
    assert (
        '"f_backward.kernel(Tensor grad, Tensor x, Tensor bias, Tensor scale) -> (Tensor, Tensor, Tensor)"'
        in files["f_cpu.cpp"]
    )
    assert "outputs[] = {{Layout::plain, 1}, {Layout::plain, 0}, {Layout::plain, 0}};" in files["f_cpu.cpp"]
    assert "uniform(int input) { return input == 2; }" in files["functors.h"]
    assert "uniform(int input) { return input == 3; }" in files["functors.h"], "of the gradient, which also reads grad"


def test_the_layouts_have_one_order_in_both_languages() -> None:
    (names,) = re.findall(r"enum class Layout \{ (.*) \};", (ROOT / "csrc/plan.h").read_text())
    assert names.split(", ") == [layout.value for layout in Layout]


@pytest.mark.needs("cxx")
def test_an_op_may_be_named_like_what_the_loops_use(tmp_path: Path) -> None:
    spec = specfile.read_text("ops: {run: {inputs: [load, rows], params: {store: 2}, expr: load * rows + store}}").ops[
        0
    ]
    for name, text in codegen.generate([spec], gpu=False).items():
        (tmp_path / name).write_text(text)
    (tmp_path / "bind.cpp").write_text('#include "bindings.h"\n')
    for source in ("run_cpu.cpp", "bind.cpp"):
        command = [tool("cxx"), "-std=c++17", "-fsyntax-only", f"-I{ROOT / 'csrc'}", f"-I{tmp_path}", tmp_path / source]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_a_file_holds_four_ops_and_is_named_by_the_first() -> None:
    text = "ops:\n" + "".join(f"  op{i}: {{inputs: [x], expr: x + {i}}}\n" for i in range(5))
    files = codegen.generate(specfile.read_text(text).ops, gpu=True)
    assert set(files) - {"functors.h", "entry_points.h", "bindings.h"} == {
        f"op{i}_{where}" for i in (0, 4) for where in ("cpu.cpp", "gpu.cu")
    }
    assert all(f"const Op op{i} = " in files["op0_cpu.cpp"] for i in range(4))


def test_gpu_sources_are_written_only_for_a_gpu() -> None:
    cpu, gpu = (set(codegen.generate([limited()], gpu=gpu)) for gpu in (False, True))
    assert gpu - cpu == {"limited_gpu.cu"}


def test_every_primitive_has_a_test_here() -> None:
    assert {spec.name.removeprefix("op_") for spec in FORWARD} >= set(PRIMITIVES) - {"where"}


@pytest.fixture(scope="module")
def functors(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """All of `SPECS`, compiled by the host's compiler from the text that nvcc compiles."""
    folder = tmp_path_factory.mktemp("functors")
    (folder / "functors.h").write_text(codegen.generate(FORWARD, gpu=False)["functors.h"])
    calls = "".join(
        f'extern "C" void {spec.name}(int dtype, const char** in, char** out, long n, const double* params) {{\n'
        f"  call<functors::{spec.name}>(dtype, in, out, n, params);\n}}\n"
        for spec in SPECS
    )
    (folder / "functors.cpp").write_text(
        """#include "functors.h"
using namespace relu2ir;
template <class F>
void call(int dtype, const char** in, char** out, long n, const double* params) {
  with_element(static_cast<Dtype>(dtype), [&](auto element) {
    using T = decltype(element);
    for (long i = 0; i < n; ++i) {
      Compute<T> x[F::inputs], y[F::outputs];
      for (int k = 0; k < F::inputs; ++k) x[k] = load(reinterpret_cast<const T*>(in[k])[i]);
      F::apply(x, y, params);
      for (int k = 0; k < F::outputs; ++k) reinterpret_cast<T*>(out[k])[i] = store<T>(y[k]);
    }
  });
}
"""
        + calls
    )
    command = [tool("cxx"), "-std=c++17", "-O3", "-ffp-contract=off", "-shared", "-fPIC", "-Wall", "-Werror"]
    command += [f"-I{ROOT / 'csrc'}", folder / "functors.cpp", "-o", folder / "functors.so"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "functors.so"))


def run(functor: Callable[..., None], spec: OpSpec, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One tensor per expression of ``spec``."""
    outputs = [torch.empty_like(parts[0]) for _ in spec.exprs]
    pointers = [(ctypes.c_void_p * len(ts))(*(t.data_ptr() for t in ts)) for ts in (parts, outputs)]
    params = (ctypes.c_double * (len(spec.params) + 1))(*spec.params.values())
    functor(DTYPES.index(parts[0].dtype), *pointers, ctypes.c_long(parts[0].numel()), params)
    return outputs


def special_values(dtype: torch.dtype) -> list[float]:
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps
    positive = [0.0, least, info.smallest_normal - least, info.smallest_normal, 1 + info.eps, 1.5, 20.0, info.max]
    return [float("nan"), float("inf"), -float("inf"), *positive, *(-value for value in positive)]


def pack(layout: Layout, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return {
        Layout.plain: lambda: parts[0],
        Layout.halves: lambda: torch.cat(list(parts), -1),
        Layout.pairs: lambda: torch.stack(list(parts), -1).flatten(-2),
    }[layout]()


@pytest.mark.needs("cxx")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_functors_compute_their_formula(functors: ctypes.CDLL, spec: OpSpec, dtype: torch.dtype) -> None:
    # A random expression is held at finite values only: there its errors are those of first order.
    special = special_values(dtype) if spec.namespace != "random" else [0.0, 1.0, -1.0]
    grid = torch.tensor(list(itertools.product(special, repeat=len(spec.parts))), dtype=torch.float64)
    values = torch.cat([grid, 2 * torch.randn(1000, len(spec.parts), dtype=torch.float64)]).to(dtype)
    parts = [column.contiguous() for column in values.unbind(-1)]
    results = iter(run(functors[spec.name], spec, parts))
    given = iter(parts)
    args = [pack(input.layout, [next(given) for _ in input.parts]) for input in spec.inputs]
    outputs = [pack(output.layout, [next(results) for _ in output.exprs]) for output in spec.outputs]
    assert mismatches(spec, args, outputs) == []


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


@pytest.mark.needs("cxx")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_relu_squared_is_eager_to_the_bit(functors: ctypes.CDLL, dtype: torch.dtype) -> None:
    """In half types on every value there is: loads, rounding, overflow and subnormals are all in it."""
    spec = next(spec for spec in SPECS if spec.name == "relu_squared")
    if dtype.itemsize == 2:
        x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    else:
        x = torch.tensor(special_values(dtype), dtype=dtype)
    (y,), expected = run(functors[spec.name], spec, [x]), torch.square(torch.relu(x))
    nan = expected.isnan()
    assert torch.equal(y.isnan(), nan)
    assert torch.equal(bits(y)[~nan], bits(expected)[~nan])
