"""Gated activations on a GPU: kernels, eager PyTorch and torch.compile against a copy of as many bytes.

    python benchmarks/benchmark_gated.py [--ops silu_and_mul,...] [--dtype bfloat16] [--out benchmarks/results]

Forward and gradient kernels by themselves, each in a CUDA graph, in microseconds. The gradient of torch.compile is its
own compiled backward of the plain expression. Every result is held to the op's bounds on its first rows before it is
timed; one that is wrong exits with 1. Compare times within a row only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from benchmark_relu_squared import custom_providers, graph_time, machine, table, write

from relu2ir import library
from relu2ir.oracle import mismatches
from relu2ir.registry import provider
from relu2ir.spec import OpSpec

SHAPES = [(256, 11008), (1024, 12288), (4096, 12288), (16384, 12288), (16384, 12289)]  # rows, columns of one half
OPS = "silu_and_mul,gelu_tanh_and_mul,swigluoai_and_mul"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default=OPS)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--out", type=Path, help="folder for the table as CSV, and the machine as JSON")
    args = parser.parse_args()
    custom, rows = custom_providers("cuda"), []
    for op in args.ops.split(","):
        for shape in SHAPES:
            for spec in library.find(op).with_gradients:
                row = measure(spec, shape, getattr(torch, args.dtype), custom)
                if row is None:
                    return 1
                rows.append(row)
                print(".. " + "  ".join(map(str, row.values())), file=sys.stderr, flush=True)
    print(table(rows))
    if args.out:
        about = machine("cuda", args.dtype) | {"command": f"python benchmarks/benchmark_gated.py --dtype {args.dtype}"}
        write(args.out, f"gated_cuda_{args.dtype}", rows, about)
    return 0


def measure(spec: OpSpec, shape: tuple[int, int], dtype: torch.dtype, custom: list[str]) -> dict[str, object] | None:
    """One row, or None after saying what is wrong."""
    torch._dynamo.reset()
    count, columns = shape
    x = torch.randn(count, 2 * columns, dtype=dtype, device="cuda")
    tensors = [x] if spec.forward is None else [torch.randn(count, columns, dtype=dtype, device="cuda"), x]
    params, plain = list(spec.params.values()), provider("native", "").lower(spec)
    calls: dict[str, Callable[..., torch.Tensor]] = {name: provider(name, "").lower(spec) for name in custom}
    calls |= {"eager": plain, "compiled": torch.compile(plain, dynamic=False)}
    half = sum(tensor.numel() for tensor in tensors) + x.numel() // (2 if spec.forward is None else 1)
    source = torch.empty(half // 2, dtype=dtype, device="cuda")
    into = torch.empty_like(source)
    row: dict[str, object] = {"op": spec.name, "rows": count, "columns": columns}
    for name, call in calls.items():
        few = [tensor[:16] for tensor in tensors]
        result = call(*tensors, *params)
        problems = mismatches(spec, [*few, *params], [result[:16]], dtype if name == "eager" else None)
        if problems and name in custom:
            print(f"FAILED: {spec.name} by {name} at {shape} {dtype}: {problems[0]}", file=sys.stderr)
            return None
        del result
        row[name] = round(graph_time(lambda _, call=call: call(*tensors, *params), x), 2)
    row["copy"] = round(graph_time(lambda _: into.copy_(source), x), 2)
    return row | {f"{name}_to_copy": round(row[name] / row["copy"], 3) for name in (*custom, "compiled")}  # type: ignore[operator]


if __name__ == "__main__":
    sys.exit(main())
