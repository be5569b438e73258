"""The provider `cpp` against eager PyTorch and torch.compile on this CPU, by op, dtype and size.

    python benchmarks/cpu_sweep.py [--ops relu_squared,silu_and_mul] [--dtypes float32] [--sizes 1000,1000000] [--out F]

A size is the number of results. Each result is compared with eager before it is timed; a difference exits with 1. A
time is the least of the repeats' medians over interleaved rounds, in microseconds; eager and compile stand there again
as how many times longer they take than `cpp`.
"""

from __future__ import annotations

import argparse
import csv
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

import relu2ir

ACT = torch.nn.functional
Call = Callable[..., torch.Tensor]


def halves(act: Call) -> Call:
    def call(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return act(gate) * up

    return call


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    return torch.square(torch.relu(x))


def swigluoai_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


gelu_tanh = functools.partial(ACT.gelu, approximate="tanh")
EAGER: dict[str, Call] = {
    "relu_squared": relu_squared,
    "gelu_tanh": gelu_tanh,
    "silu_and_mul": halves(ACT.silu),
    "gelu_tanh_and_mul": halves(gelu_tanh),
    "relu_squared_and_mul": halves(relu_squared),
    "swigluoai_and_mul": swigluoai_and_mul,
    "silu_mul": lambda gate, up: ACT.silu(gate) * up,
}
SIZES = "1000,10000,100000,1000000,10000000,30000000"
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 5e-3}  # eager rounds each step to the dtype
LONGEST_ROW = 4096


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default=",".join(EAGER))
    parser.add_argument("--dtypes", default="float32,bfloat16,float16")
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="the table as CSV")
    args = parser.parse_args()
    rows = []
    print("op\tdtype\tsize\tcpp us\teager us\tcompile us\teager/cpp\tcompile/cpp")
    for op in args.ops.split(","):
        for dtype in args.dtypes.split(","):
            for size in map(int, args.sizes.split(",")):
                row = measure(op, dtype, size, args.rounds, args.repeats)
                if row is None:
                    return 1
                rows.append(row)
                print(*row.values(), sep="\t", flush=True)
    if args.out:
        with args.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    return 0


def measure(op: str, dtype: str, size: int, rounds: int, repeats: int) -> dict[str, object] | None:
    """One row, or None after saying that the results differ."""
    columns = next(width for width in range(min(size, LONGEST_ROW), 0, -1) if size % width == 0)
    shape = (size // columns, columns * (2 if "_and_" in op else 1))
    tensors = [torch.randn(shape).to(getattr(torch, dtype)) for _ in range(2 if op == "silu_mul" else 1)]
    torch._dynamo.reset()
    calls: dict[str, Call] = {
        "cpp": getattr(relu2ir.ops, op),
        "eager": EAGER[op],
        "compile": torch.compile(EAGER[op], dynamic=False),
    }
    with torch.no_grad(), relu2ir.use(providers="cpp"):
        expected = EAGER[op](*tensors).float()
        for name, call in calls.items():
            limit = TOLERANCE[dtype]
            if not torch.allclose(call(*tensors).float(), expected, rtol=limit, atol=limit):
                print(f"FAILED: {name} differs from eager for {op} at {size} {dtype}", file=sys.stderr)
                return None
        times = {name: min(values) for name, values in timed(calls, tensors, size, rounds, repeats).items()}
    row: dict[str, object] = {"op": op, "dtype": dtype, "size": size}
    row |= {f"{name}_us": round(value, 2) for name, value in times.items()}
    return row | {f"{name}_ratio": round(times[name] / times["cpp"], 2) for name in ("eager", "compile")}


def timed(
    calls: dict[str, Call], tensors: list[torch.Tensor], size: int, rounds: int, repeats: int
) -> dict[str, list[float]]:
    """Microseconds of a call: for each repeat, the median of its rounds."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    inner = max(1, min(200, 2_000_000 // size))
    for _ in range(repeats):
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                start = time.perf_counter()
                for _ in range(inner):
                    call(*tensors)
                times[name].append((time.perf_counter() - start) * 1e6 / inner)
        for name, values in times.items():
            found[name].append(median(values))
    return found


if __name__ == "__main__":
    sys.exit(main())
