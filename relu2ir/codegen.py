"""The C++ that is written for ops: functors, entry points and bindings, as text. Needs no torch: setup.py calls it.

`csrc/` holds the loops; a functor is what one op puts inside them. The generated files stay in ``build/generated/``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from relu2ir.providers.compiled import functor
from relu2ir.spec import Layout, OpSpec

_HEAD = "// Generated from ops.yaml by relu2ir/codegen.py; change that, not this.\n"


def generate(specs: Sequence[OpSpec], gpu: bool) -> dict[str, str]:
    """The generated files by name, for the forward ops ``specs`` and their gradient ops.

    One ``.cpp`` per op, and with ``gpu`` one ``.cu``: they compile side by side.
    """
    every = [op for spec in specs for op in spec.with_backward]
    files = {
        "functors.h": _header(["<cmath>", '"scalar.h"'], "relu2ir::functors", (functor(op) for op in every)),
        "entry_points.h": _header(['"plan.h"'], "relu2ir::entry", (_entry_points(op) for op in every)),
        "bindings.h": _bindings(specs, every),
    }
    for spec in specs:
        files[f"{spec.name}_cpu.cpp"] = _instances(spec, "cpu")
        if gpu:
            files[f"{spec.name}_gpu.cu"] = _instances(spec, "gpu")
    return files


def _header(includes: Iterable[str], namespace: str, blocks: Iterable[str]) -> str:
    included = "\n".join(f"#include {name}" for name in includes)
    body = "\n".join(blocks)
    return f"{_HEAD}#pragma once\n\n{included}\n\nnamespace {namespace} {{\n\n{body}\n}}  // namespace {namespace}\n"


def _operands(spec: OpSpec) -> int:
    return len(spec.parts) + len(spec.exprs)


def _entry_points(spec: OpSpec) -> str:
    plan = f"const Plan<{_operands(spec)}>& plan, Dtype dtype, const double* params"
    return f"// {spec.schema}\nvoid {spec.name}_cpu({plan});\nvoid {spec.name}_gpu({plan}, void* stream);\n"


def _instances(spec: OpSpec, where: str) -> str:
    stream, given = (", void* stream", ", stream") if where == "gpu" else ("", "")
    entries = [
        f"void {op.name}_{where}(const Plan<{_operands(op)}>& plan, Dtype dtype, const double* params{stream}) {{\n"
        f"  relu2ir::run_{where}<functors::{op.name}>(plan, dtype, params{given});\n}}\n"
        for op in spec.with_backward
    ]
    includes = "\n".join(f'#include "{name}.h"' for name in ("entry_points", "functors", f"loop_{where}"))
    body = "\n".join(entries)
    return f"{_HEAD}{includes}\n\nnamespace relu2ir::entry {{\n\n{body}\n}}  // namespace relu2ir::entry\n"


def _bindings(specs: Sequence[OpSpec], every: Sequence[OpSpec]) -> str:
    rows = ",\n".join(f"    {_row(op)}" for op in every)
    hashes = ",\n".join(f'    {{"{spec.name}", "{spec.hash}"}}' for spec in specs)
    tables = f"inline const Op OPS[] = {{\n{rows},\n}};\n\ninline const Definition DEFINITIONS[] = {{\n{hashes},\n}};\n"
    includes = [f'"{name}.h"' for name in ("binding", "entry_points", "fake", "functors")]
    return _header(includes, "relu2ir", [*(_signature(op) for op in every), tables])


def _signature(spec: OpSpec) -> str:
    inputs = ", ".join(_layout(input.layout) for input in spec.inputs)
    # A gradient is laid out like the input of its name; a forward result, and the gradient of an input that broadcasts,
    # like (the first part of) the first input.
    names = [None if input.layout.broadcast else input.name for input in spec.inputs]
    likes = [names.index(output.name) if output.name in names else 0 for output in spec.outputs]
    outputs = ", ".join(f"{{{_layout(output.layout)}, {like}}}" for output, like in zip(spec.outputs, likes))
    return (
        f"struct {spec.name}_tensors {{\n"
        f"  static constexpr Layout inputs[] = {{{inputs}}};\n"
        f"  static constexpr Output outputs[] = {{{outputs}}};\n}};\n"
    )


def _layout(layout: Layout) -> str:
    return f"Layout::{layout.value}"


def _row(spec: OpSpec) -> str:
    name = f"{spec.name}.kernel"
    arguments = ", ".join([*(f"Tensor {input.name}" for input in spec.inputs), *(f"float {p}" for p in spec.params)])
    types = f"functors::{spec.name}, {spec.name}_tensors"
    kernels = (
        f"call_cpu<{types}, entry::{spec.name}_cpu>",
        f"RELU2IR_GPU_KERNEL((call_gpu<{types}, entry::{spec.name}_gpu>))",
        f"call_meta<{spec.name}_tensors>",
    )
    counts = f"{len(spec.inputs)}, {len(spec.params)}, {len(spec.outputs)}"
    return f'{{"{name}", "{name}({arguments}) -> {spec.returns}", {counts}, {", ".join(kernels)}}}'
