"""Kernels on a GPU against a copy of as many bytes, and torch.compile: forward and gradient, by dtype and arrangement.

    python benchmarks/kernels.py [--ops silu_and_mul,...] [--dtypes bfloat16] [--compile] [--out benchmarks/results]

Each kernel by itself in a CUDA graph, in microseconds. Every result's first and last rows are held to the op's bounds
before it is timed; one that is wrong exits with 1. Compare times within a row only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from benchmark_relu_squared import custom_providers, graph_time, machine, table, write
from torch import Tensor

from relu2ir import library
from relu2ir.layout import whole_shape
from relu2ir.oracle import mismatches
from relu2ir.registry import provider
from relu2ir.spec import OpSpec

OPS = "relu_squared,gelu_tanh,silu_and_mul,swigluoai_and_mul,silu_mul"
SHAPES = [(4096, 12288), (4096, 12289), (512, 4096), (1024, 2047)]  # rows, columns of one part


def sliced(values: Tensor) -> Tensor:
    """In rows that are 64 elements longer."""
    buffer = values.new_empty(values.shape[0], values.shape[1] + 64)
    return buffer[:, : values.shape[1]].copy_(values)


def misaligned(values: Tensor) -> Tensor:
    """One element away from a vector's boundary."""
    return values.new_empty(values.numel() + 1)[1:].view(values.shape).copy_(values)


PLACES: dict[str, Callable[[Tensor], Tensor]] = {"dense": lambda x: x, "sliced": sliced, "misaligned": misaligned}

CASES = [*((shape, "dense") for shape in SHAPES), (SHAPES[0], "sliced"), (SHAPES[0], "misaligned")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default=OPS)
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--compile", action="store_true", help="time torch.compile too, where tensors are dense")
    parser.add_argument("--out", type=Path, help="folder for the table as CSV, and the machine as JSON")
    args = parser.parse_args()
    custom, rows = custom_providers("cuda"), []
    for op in args.ops.split(","):
        for spec in library.find(op).with_gradients[:2]:
            for dtype in (getattr(torch, name) for name in args.dtypes.split(",")):
                for shape, place in CASES:
                    row = measure(spec, shape, place, dtype, custom, args.compile)
                    if row is None:
                        return 1
                    rows.append(row)
                    print(".. " + "  ".join(map(str, row.values())), file=sys.stderr, flush=True)
    print(table(rows))
    if args.out:
        about = machine("cuda", args.dtypes) | {"command": f"python benchmarks/kernels.py --dtypes {args.dtypes}"}
        write(args.out, "kernels_cuda", rows, about)
    return 0


def measure(
    spec: OpSpec, shape: tuple[int, int], place: str, dtype: torch.dtype, custom: list[str], compiled: bool
) -> dict[str, object] | None:
    """One row, or None after saying what is wrong."""
    torch._dynamo.reset()
    shapes = [whole_shape(input.layout, shape) for input in spec.inputs]
    tensors = [PLACES[place](torch.randn(each, dtype=dtype, device="cuda")) for each in shapes]
    params, plain = list(spec.params.values()), provider("native", "").lower(spec)
    calls: dict[str, Callable[..., object]] = {name: provider(name, "").lower(spec) for name in custom}
    if compiled and place == "dense":
        calls["compiled"] = torch.compile(plain, dynamic=False)
    row: dict[str, object] = {"op": spec.name, "dtype": str(dtype)[6:], "rows": shape[0], "columns": shape[1]}
    row["place"] = place
    elements = 0
    for name, call in calls.items():
        found = call(*tensors, *params)
        results = found if isinstance(found, tuple) else (found,)
        elements = sum(each.numel() for each in (*tensors, *results))
        for few in (slice(8), slice(-8, None)):
            args = [*(tensor[few] for tensor in tensors), *params]
            problems = mismatches(spec, args, [each[few] for each in results])
            if problems and name in custom:
                print(f"FAILED: {spec.name} by {name} at {shape} {dtype}: {problems[0]}", file=sys.stderr)
                return None
        del found, results
        row[name] = round(graph_time(lambda _, call=call: call(*tensors, *params), tensors[0]), 2)
    source = torch.empty(elements // 2, dtype=dtype, device="cuda")
    into = torch.empty_like(source)
    copy = graph_time(lambda _: into.copy_(source), source)
    ratios = {f"{name}_to_copy": round(row[name] / copy, 3) for name in custom}  # type: ignore[operator]
    return row | {"compiled": row.get("compiled", ""), "copy": round(copy, 2)} | ratios


if __name__ == "__main__":
    sys.exit(main())
