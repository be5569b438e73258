"""The inner loops of the `cpp` provider: their functions against float64, and one instruction set against the other."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from requirements import tool

from relu2ir import building, codegen, specfile
from relu2ir.oracle import ulp

CSRC = Path(__file__).parent.parent / "csrc"
# A functor over numbers of the compute type, by the loop for each instruction set.
LOOPS = """
#include "columns.h"
#include "functors.h"
using namespace relu2ir;
#define SEEN __attribute__((visibility("default")))
template <class F, class C>
void call(bool wide, const void* const* in, void* const* out, long n) {
  const C* from[F::inputs];
  C* to[F::outputs];
  for (int k = 0; k < F::inputs; ++k) from[k] = static_cast<const C*>(in[k]);
  for (int k = 0; k < F::outputs; ++k) to[k] = static_cast<C*>(out[k]);
#ifdef RELU2IR_AVX2
  if (wide) return apply_all_avx2<F, C>(from, to, n, nullptr);
#endif
  apply_all<F, Elementary<false>, C>(from, to, n, nullptr);
}
extern "C" SEEN bool wide() { return has_avx2(); }
"""
# Whether the columns of pairs, of these sizes and strides, follow each other in one plan.
PAIRS = """
#include <cstdio>
#include <cstdlib>
#include "plan.h"
using namespace relu2ir;
struct Pairs {
  static constexpr int inputs = 2, outputs = 1;
  static constexpr bool uniform(int) { return false; }
  static constexpr bool paired(int operand) { return operand == 0; }
};
int main(int, char** argument) {
  static float memory[4096];
  View whole;
  whole.data = reinterpret_cast<char*>(memory);
  whole.dims = 2;
  for (int d = 0; d < 2; ++d) whole.sizes[d] = atoi(argument[1 + d]), whole.strides[d] = atoi(argument[3 + d]);
  View result = part_of(whole, Layout::pairs, 0, 4);
  dense_strides(part_of(whole, Layout::pairs, 0, 4), result.strides);
  const View operands[] = {part_of(whole, Layout::pairs, 0, 4), part_of(whole, Layout::pairs, 1, 4), result};
  printf("%d\\n", plan_over<Pairs>(operands, 4).unit);
}
"""
# Functions of which each float has one value, within 2 ulp of the exact one; their square is there to be exact.
FUNCTIONS = ("exp", "expm1", "log1p", "tanh", "erf", "erfc")


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("loops")
    text = "".join(f"  f_{name}: {{inputs: [x], expr: {name}(x)}}\n" for name in FUNCTIONS)
    extra = "  exact: {inputs: [x, y], expr: 'clamp(x * y + square(relu(x)), -2, 2) / (abs(y) + 1)'}\n"
    specs = specfile.read_text(f"ops:\n{text}{extra}").ops
    (folder / "functors.h").write_text(codegen.generate(specs, gpu=False)["functors.h"])
    calls = "".join(
        f'extern "C" SEEN void {spec.name}_{type}(bool wide, const void* const* in, void* const* out, long n) {{\n'
        f"  call<functors::{spec.name}, {type}>(wide, in, out, n);\n}}\n"
        for spec in specs
        for type in ("float", "double")
    )
    (folder / "loops.cpp").write_text(LOOPS + calls)
    command = [tool("cxx"), *building.CXX_FLAGS, "-fPIC", "-shared", "-Wall", "-Werror", f"-I{CSRC}", f"-I{folder}"]
    subprocess.run([*command, folder / "loops.cpp", "-o", folder / "loops.so"], check=True)
    library = ctypes.CDLL(str(folder / "loops.so"))
    library.wide.restype = ctypes.c_bool
    return library


def looped(loops: ctypes.CDLL, name: str, wide: bool, *inputs: torch.Tensor) -> torch.Tensor:
    type = {torch.float32: "float", torch.float64: "double"}[inputs[0].dtype]
    out = torch.empty_like(inputs[0])
    pointers = [(ctypes.c_void_p * len(ts))(*(t.data_ptr() for t in ts)) for ts in (inputs, [out])]
    loops[f"{name}_{type}"](ctypes.c_bool(wide), *pointers, ctypes.c_long(out.numel()))
    return out


def floats(step: int) -> torch.Tensor:
    """Every ``step``-th float32 there is, of both signs, infinities, NaN and subnormals among them."""
    some = torch.arange(-(2**31), 2**31, step).to(torch.int32).view(torch.float32)
    edges = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1.0, -1.0, 1e-45, -1e-45, 88.722839, -103.97]
    return torch.cat([torch.tensor(edges), some])


@pytest.mark.needs("cxx")
@pytest.mark.parametrize("wide", [False, True], ids=["plain", "avx2"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_functions_are_within_2_ulp_of_the_exact_ones(loops: ctypes.CDLL, name: str, wide: bool) -> None:
    if wide and not loops.wide():
        pytest.skip("this CPU has no AVX2")
    x = floats(step=2003)
    exact = getattr(torch.special if name == "erfc" else torch, name)(x.double())
    got, rounded = looped(loops, f"f_{name}", wide, x), exact.float()
    finite = rounded.isfinite() & got.isfinite()
    assert torch.equal(got[~finite].nan_to_num(nan=7.0), rounded[~finite].nan_to_num(nan=7.0))
    errors = (got.double() - exact).abs()[finite] / ulp(exact[finite], torch.float32)
    assert errors.max() < 1.1, "what csrc/elementary.h states"


@pytest.mark.needs("cxx")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_operations_that_are_exact_have_the_same_bits_in_every_loop(loops: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Also on either side of where the vectors end."""
    if not loops.wide():
        pytest.skip("this CPU has no AVX2")
    x = floats(step=100_003).to(dtype)
    y = x.flip(0).roll(1)
    for length in (1, 7, 8, 9, 31, 32, 33, len(x)):
        plain, avx2 = (looped(loops, "exact", wide, x[:length], y[:length]) for wide in (False, True))
        nan = plain.isnan()
        assert torch.equal(avx2.isnan(), nan)
        word = {4: torch.int32, 8: torch.int64}[dtype.itemsize]
        assert torch.equal(plain.view(word)[~nan], avx2.view(word)[~nan])


@pytest.mark.needs("cxx")
def test_pairs_are_read_together_only_where_they_lie_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "pairs.cpp").write_text(PAIRS)
    program = tmp_path / "pairs"
    command = [*building.compiler(), "-std=c++17", f"-I{CSRC}", str(tmp_path / "pairs.cpp"), "-o", str(program)]
    subprocess.run(command, check=True)
    together = {(8, 32, 32, 1): 1, (8, 32, 40, 1): 1, (8, 2, 2, 1): 1, (16, 8, 2, 32): 0, (8, 2, 2, 100): 0}
    for place, expected in together.items():
        found = subprocess.run([program, *map(str, place)], check=True, capture_output=True, text=True).stdout
        assert int(found) == expected, place
