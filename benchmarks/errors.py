"""The largest error of every op on every provider that is here, against the same formula in float64.

    python benchmarks/errors.py [--ops silu,gelu] [--out benchmarks/results]

A row is an op, a provider and a dtype. ``max_ulp`` is the distance from the exact result in units of the result type's
last place (0.5 is correctly rounded), of results that no float32 step of the way underflows for (from 2**-100 up);
``max_abs`` the largest distance of all, ``at`` the operands of ``max_ulp``. Operands lie within +-64: all values of a
half type; in float32 2**22 log-uniform ones from 2**-20 up and 2**20 normal ones. Several are paired at random. Where
terms cancel, as in 1 + tanh(x), there is no bound in ulp, and ``max_abs`` says how good a result is.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from relu2ir import library, registry
from relu2ir.ir.emit import expanded
from relu2ir.oracle import evaluate, packed, scalars, ulp
from relu2ir.spec import Layout, OpSpec

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LOG_UNIFORM, NORMAL = 2**22, 2**20
LARGEST, LEAST_RESULT = 2.0**6, 2.0**-100


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="", help="only these, separated by commas")
    parser.add_argument("--out", type=Path, help="folder for the table as CSV, named by the machine")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = args.ops.split(",") if args.ops else [spec.name for spec in library.specs()]
    rows = []
    for spec in map(library.find, chosen):
        for dtype in DTYPES:
            tensors = samples(spec, dtype)
            exact = exact_result(spec, tensors)
            for provider in providers(spec, [tensor[:1].to(device) for tensor in tensors]):
                call = library.function(spec.qualname)
                got = call(*[tensor.to(device) for tensor in tensors], provider=provider).cpu()
                rows.append({"op": spec.name, "provider": provider, **error(spec, tensors, got, exact)})
                print(*rows[-1].values(), sep="\t", flush=True)
    if args.out:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        with (args.out / f"errors_{re.sub('[^a-z0-9]+', '_', name.lower())}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    return 0


def providers(spec: OpSpec, tensors: Sequence[torch.Tensor]) -> list[str]:
    """The providers that would run these operands here."""
    names = ("cuda", "triton", "cpp", "native")
    return [name for name in names if registry.explain(spec, *tensors, providers=name).chosen]


def samples(spec: OpSpec, dtype: torch.dtype) -> list[torch.Tensor]:
    """The op's tensors, one row of a column for each sample, on the CPU."""
    generator = torch.Generator().manual_seed(0)

    def values(alone: bool) -> torch.Tensor:
        if dtype == torch.float32:
            log = torch.empty(LOG_UNIFORM).uniform_(-20, 6, generator=generator).exp2()
            found = torch.cat([log[::2], -log[1::2], 3 * torch.randn(NORMAL, generator=generator)])
        else:
            every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
            found = every[every.abs() <= LARGEST]
        if alone:
            return found
        return found[torch.randint(len(found), (LOG_UNIFORM,), generator=generator)]

    def tensor(layout: Layout, parts: int) -> torch.Tensor:
        if layout.broadcast:
            return torch.full((1,), 0.7, dtype=dtype)
        return packed(layout, [values(len(spec.parts) == 1)[:, None] for _ in range(parts)])

    return [tensor(input.layout, len(input.parts)) for input in spec.inputs]


def exact_result(spec: OpSpec, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The op in float64, by the formulas that neither overflow nor cancel."""
    (expr,) = expanded(spec.exprs)
    return evaluate(expr, scalars(spec, tensors, torch.float64), torch.float64)


def error(spec: OpSpec, tensors: Sequence[torch.Tensor], got: torch.Tensor, exact: torch.Tensor) -> dict[str, str]:
    """The cells of a row after its op and provider."""
    dtype = got.dtype
    distance = torch.where(exact.to(dtype).isfinite(), (got.double() - exact).abs(), 0)
    ulps = torch.where(exact.abs() < LEAST_RESULT, 0, distance / ulp(exact, dtype))
    worst = int(ulps.argmax())
    row = [part[worst].item() for part in scalars(spec, tensors, torch.float64).values() if part.numel() == len(got)]
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "max_ulp": f"{ulps.max().item():.4g}",
        "max_abs": f"{distance.max().item():.3g}",
        "at": " ".join(f"{value:.9g}" for value in row),
    }


if __name__ == "__main__":
    sys.exit(main())
