"""relu_squared against PyTorch: custom kernels, native eager, native under torch.compile, and ``copy_`` as the floor.

    python benchmarks/benchmark_relu_squared.py [--dtype bfloat16] [--out benchmarks/results]

Every provider's result is compared with native at every point *before* it is timed; a difference exits with 1. On a GPU
two times stand side by side: the kernel's in a CUDA graph, which hides the cost of launching, and the call's, host
included. On a CPU a small grid runs and only the call is timed. Times are medians over interleaved rounds, in
microseconds; compare them within a row only.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

import relu2ir

GPU_GRID = [(b, s, w) for b in (1, 16, 128) for s in (1, 16, 64, 1024, 4096) for w in (3072, 9728, 12288)]
CPU_GRID = [(b, s, w) for b in (1, 16) for s in (1, 16, 64) for w in (3072, 12288)]
ROUNDS = 25
GRAPH_CALLS = 20
# A point must fit with its results and what the graph holds: 128 x 4096 x 12288 in bfloat16 is 12.9 GB a tensor.
MEMORY_PER_POINT = 6

Call = Callable[[torch.Tensor], torch.Tensor]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--out", type=Path, help="folder for the table as CSV, and the machine as JSON")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, args.dtype)
    custom = custom_providers(device)
    about = machine(device, args.dtype)
    print(f"{about['device']}, torch {about['torch']}, {args.dtype}; providers: {', '.join(custom)}")
    rows = []
    for index, shape in enumerate(grid := GPU_GRID if device == "cuda" else CPU_GRID):
        print(f".. {index + 1}/{len(grid)} {shape}", file=sys.stderr, flush=True)
        if not fits(shape, dtype, device):
            print(f".. skipped: {MEMORY_PER_POINT} tensors of that size do not fit the device", file=sys.stderr)
            continue
        row = measure(shape, dtype, device, custom)
        if row is None:
            return 1
        rows.append(row)
    print(table(rows))
    if args.out:
        write(args.out, f"relu_squared_{device}_{args.dtype}", rows, about)
    return 0


def custom_providers(device: str) -> list[str]:
    """The providers with a kernel for ``device`` that are here; the reason of the others on stderr."""
    x, here = torch.ones(4, device=device), []
    for name in ("cuda", "triton", "cpp"):
        explanation = relu2ir.explain("relu_squared", x, providers=name)
        if explanation.chosen:
            here.append(name)
        else:
            print(f".. {explanation.decisions[0]}", file=sys.stderr)
    return here


def fits(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> bool:
    if device == "cpu":
        return True
    size = torch.Size(shape).numel() * dtype.itemsize
    return size * MEMORY_PER_POINT < torch.cuda.get_device_properties(0).total_memory


def native(x: torch.Tensor) -> torch.Tensor:
    return torch.square(torch.relu(x))


def provided(name: str) -> Call:
    def call(x: torch.Tensor) -> torch.Tensor:
        return relu2ir.ops.relu_squared(x)

    call.__name__ = name
    return call


def measure(shape: tuple[int, ...], dtype: torch.dtype, device: str, custom: list[str]) -> dict[str, object] | None:
    """One row, or None after saying where a result differs."""
    x = torch.randn(shape, dtype=dtype, device=device)
    into = torch.empty_like(x)
    torch._dynamo.reset()
    calls: dict[str, Call] = {name: provided(name) for name in custom}
    calls |= {"native": native, "compiled": torch.compile(native, dynamic=False), "copy": into.copy_}
    expected = native(x)
    row: dict[str, object] = {"batch": shape[0], "sequence": shape[1], "width": shape[2], "elements": x.numel()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name, call in calls.items():
        with relu2ir.use(providers=name if name in custom else None):
            if name != "copy" and not torch.equal(call(x), expected):
                print(f"FAILED: {name} differs from native at {shape} {dtype}", file=sys.stderr)
                return None
            if device == "cuda":
                row[f"{name}_graph_us"] = round(graph_time(call, x), 3)
    del expected
    for _ in range(ROUNDS):
        for name, call in calls.items():
            with relu2ir.use(providers=name if name in custom else None):
                times[name].append(call_time(call, x))
    return row | {f"{name}_call_us": round(median(values), 3) for name, values in times.items()}


def graph_time(call: Call, x: torch.Tensor) -> float:
    """Microseconds of one call within a CUDA graph of `GRAPH_CALLS`, the median of `ROUNDS` replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_CALLS):
            call(x)
    times = []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / GRAPH_CALLS)
    return median(times)


def call_time(call: Call, x: torch.Tensor) -> float:
    """Microseconds of one call as a caller sees it, launch included, over as many as take about a millisecond."""
    repeats = max(1, min(50, 2**26 // max(1, x.numel() * x.element_size())))
    call(x)
    if x.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call(x)
    if x.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e6 / repeats


def table(rows: list[dict[str, object]]) -> str:
    """The rows as aligned text."""
    cells = [list(rows[0])] + [[str(value) for value in row.values()] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in cells)


def machine(device: str, dtype: str) -> dict[str, str]:
    cpu = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "relu2ir": relu2ir.__version__,
        "command": f"python benchmarks/benchmark_relu_squared.py --dtype {dtype}",
    }


def write(folder: Path, name: str, rows: list[dict[str, object]], about: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    (folder / f"{name}.json").write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
