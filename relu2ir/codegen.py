"""The C++ that is written for ops: functors, entry points and bindings, as text. Needs no torch: setup.py calls it.

`csrc/` holds the loops; a functor is what one op puts inside them. The generated files stay in ``build/generated/``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from relu2ir.providers.compiled import functor
from relu2ir.spec import Layout, OpSpec

_HEAD = "// Generated from ops.yaml by relu2ir/codegen.py; change that, not this.\n"


# nvcc reads its headers for 2.5 s and compiles an op for 4 (one architecture, 2 cores): four share a file, which is
# still little enough to compile side by side.
OPS_PER_FILE = 4


def generate(specs: Sequence[OpSpec], gpu: bool) -> dict[str, str]:
    """The generated files by name, for the forward ops ``specs``, of one namespace, and their gradient ops.

    One ``.cpp`` for every few ops, named by the first of them, and with ``gpu`` one ``.cu``: they compile side by side.
    """
    every = _with_gradients(specs)
    files = {
        "functors.h": _header(['"elementary.h"'], "relu2ir::functors", map(functor, every)),
        "entry_points.h": _header(['"plan.h"'], "relu2ir::entry", map(_entry_points, every)),
        "bindings.h": _bindings(specs, every),
    }
    for start in range(0, len(specs), OPS_PER_FILE):
        ops = _with_gradients(specs[start : start + OPS_PER_FILE])
        files[f"{ops[0].name}_cpu.cpp"] = _instances(ops, "cpu") + _rows(ops)
        if gpu:
            files[f"{ops[0].name}_gpu.cu"] = _instances(ops, "gpu")
    return files


def _with_gradients(specs: Iterable[OpSpec]) -> list[OpSpec]:
    return [op for spec in specs for op in spec.with_gradients]


def _in_place(specs: Iterable[OpSpec]) -> list[OpSpec]:
    """The ops that write their input: rows of their own, of the same kernels."""
    return [spec.in_place for spec in specs if spec.forward is None and spec.in_place is not None]


def _header(includes: Iterable[str], namespace: str, blocks: Iterable[str]) -> str:
    included = "\n".join(f"#include {name}" for name in includes)
    body = "\n".join(blocks)
    return f"{_HEAD}#pragma once\n\n{included}\n\nnamespace {namespace} {{\n\n{body}\n}}  // namespace {namespace}\n"


def _operands(spec: OpSpec) -> int:
    return len(spec.parts) + len(spec.exprs)


def _entry_points(spec: OpSpec) -> str:
    plan = f"const Plan<{_operands(spec)}>& plan, Dtype dtype, const double* params"
    return f"// {spec.schema}\nvoid {spec.name}_cpu({plan});\nvoid {spec.name}_gpu({plan}, void* stream);\n"


def _instances(ops: Sequence[OpSpec], where: str) -> str:
    stream, given = (", void* stream", ", stream") if where == "gpu" else ("", "")
    entries = [
        f"void {op.name}_{where}(const Plan<{_operands(op)}>& plan, Dtype dtype, const double* params{stream}) {{\n"
        f"  relu2ir::run_{where}<functors::{op.name}>(plan, dtype, params{given});\n}}\n"
        for op in ops
    ]
    names = ["entry_points", "functors", f"loop_{where}", *(["bindings", "fake"] if where == "cpu" else [])]
    includes = "\n".join(f'#include "{name}.h"' for name in names)
    body = "\n".join(entries)
    return f"{_HEAD}{includes}\n\nnamespace relu2ir::entry {{\n\n{body}\n}}  // namespace relu2ir::entry\n"


def _bindings(specs: Sequence[OpSpec], every: Sequence[OpSpec]) -> str:
    every = [*every, *_in_place(specs)]
    declared = "".join(f"extern const Op {op.name};\n" for op in every)
    rows = ",\n".join(f"    &{op.name}" for op in every)
    hashes = ",\n".join(f'    {{"{spec.qualname}", "{spec.hash}"}}' for spec in specs)
    tables = (
        f'inline constexpr const char* NAMESPACE = "{specs[0].namespace}";\n\n'
        f"inline const Op* const OPS[] = {{\n{rows},\n}};\n\n"
        f"inline const Definition DEFINITIONS[] = {{\n{hashes},\n}};\n"
    )
    return _header(['"binding.h"'], "relu2ir::table", [f"{declared}\n{tables}"])


def _rows(ops: Sequence[OpSpec]) -> str:
    """How torch knows each op: beside its loops, as one file of 28 ops took 20 s."""
    tensors = "\n".join(map(_signature, ops))
    rows = "\n".join(f"const Op {op.name} = {_row(op)};\n" for op in [*ops, *_in_place(ops)])
    return (
        f"\nnamespace relu2ir::tensors {{\n\n{tensors}\n}}  // namespace relu2ir::tensors\n"
        f"\nnamespace relu2ir::table {{\n\n{rows}\n}}  // namespace relu2ir::table\n"
    )


def _signature(spec: OpSpec) -> str:
    inputs = ", ".join(_layout(input.layout) for input in spec.inputs)
    outputs = ", ".join(f"{{{_layout(output.layout)}, {output.like}}}" for output in spec.outputs)
    return (
        f"struct {spec.name} {{\n"
        f"  static constexpr Layout inputs[] = {{{inputs}}};\n"
        f"  static constexpr Output outputs[] = {{{outputs}}};\n}};\n"
    )


def _layout(layout: Layout) -> str:
    return f"Layout::{layout.value}"


def _row(spec: OpSpec) -> str:
    made = spec.forward.name if spec.writes_input and spec.forward is not None else spec.name
    types = f"functors::{made}, tensors::{made}"
    kernels = (
        f"relu2ir::call_cpu<{types}, entry::{made}_cpu>",
        f"RELU2IR_GPU_KERNEL((relu2ir::call_gpu<{types}, entry::{made}_gpu>))",
        f"relu2ir::call_meta<tensors::{made}>",
    )
    counts = f"{len(spec.inputs)}, {len(spec.params)}, {0 if spec.writes_input else len(spec.outputs)}"
    return f'{{"{spec.name}.kernel", "{spec.kernel_schema}", {counts}, {", ".join(kernels)}}}'
