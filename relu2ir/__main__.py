"""The command line: ``relu2ir explain | show | check | build | demo | fuse``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

import relu2ir
from relu2ir import demo, library, packaged, registry
from relu2ir.errors import Error
from relu2ir.layout import logical_shape
from relu2ir.platforms import PLATFORMS, platform_of
from relu2ir.registry import Imagined
from relu2ir.spec import Layout, OpSpec


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 if all is well, 1 if a check failed, 2 for a mistake in what was asked."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except Error as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="relu2ir", description="Declare, fuse and dispatch elementwise ops.")
    parser.add_argument("--version", action="version", version=f"relu2ir {relu2ir.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    explain = commands.add_parser("explain", help="say which provider runs an op and why; without one, what is here")
    explain.add_argument("op", nargs="?", help="an op's name, such as relu_squared")
    explain.add_argument("--device", default="cpu", help="a device type; no such device is needed (default: cpu)")
    explain.add_argument("--dtype", default="float32", help="a torch dtype (default: float32)")
    explain.add_argument("--shape", default="8,4096", help="sizes with commas (default: 8,4096)")
    explain.set_defaults(run=_explain)

    show = commands.add_parser("show", help="print what an op's declaration becomes")
    show.add_argument("op", help="an op's name")
    show.add_argument("--provider", help="print this provider's code for it: cuda, triton, native, ...")
    show.add_argument("--gradient", action="store_true", help="show the derived gradient op instead")
    show.set_defaults(run=lambda args: print(_shown(args)) or 0)

    check = commands.add_parser("check", help="verify your spec file and test its ops on every provider that is here")
    check.add_argument("file", help="a spec file, such as my_ops.yaml")
    check.set_defaults(run=_check)

    build = commands.add_parser("build", help="compile the ops of your spec file for the cpp and cuda providers")
    build.add_argument("file", help="a spec file, such as my_ops.yaml")
    build.set_defaults(run=lambda args: print(relu2ir.build(args.file)) or 0)

    run_demo = commands.add_parser("demo", help="fuse a small Nemotron, compare it with the original, time both")
    run_demo.set_defaults(run=lambda args: demo.demo())

    fuse = commands.add_parser("fuse", help="do the same for a model of yours")
    fuse.add_argument("factory", help="package.module:function, which returns (model, example inputs)")
    fuse.set_defaults(run=lambda args: demo.fuse_factory(args.factory))
    return parser


def _check(args: argparse.Namespace) -> int:
    from relu2ir.check import check  # imports what the tests need

    return check(args.file)


def _explain(args: argparse.Namespace) -> int:
    if args.op is None:
        print(_machine())
        return 0
    spec = library.find(args.op)
    dtype = getattr(torch, args.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise Error(f"unknown dtype '{args.dtype}'; use a torch dtype such as float32, float16 or bfloat16")
    try:
        shape = [int(size) for size in args.shape.split(",") if size]
    except ValueError:
        shape = [-1]
    if min(shape, default=0) < 0:
        raise Error(f"cannot read shape '{args.shape}'; give sizes with commas, such as 8,4096")
    try:
        device = torch.device(args.device)
    except RuntimeError:
        raise Error(f"unknown device '{args.device}'; use a torch device such as cuda, cpu, xpu or mps") from None
    print(relu2ir.explain(args.op, *_imagined(spec, shape, dtype, device)))
    return 0


def _machine() -> str:
    """What this machine has: torch, its platform, each provider with its reason, and ops by providers."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines = [f"relu2ir {relu2ir.__version__}, torch {torch.__version__}, platform here: {platform_of(device)}", ""]
    lines += ["providers"]
    for name, provider in registry.providers().items():
        lines.append(f"  {name:<8}{provider.missing() or 'here'}")
    lines += ["", "platforms"]
    lines += [f"  {platform:<8}{', '.join(registry.row(platform))}" for platform in PLATFORMS]
    if packaged.rejected:
        lines += ["", "spec files of packages that are not loaded"]
        lines += [f"  {entry}: {reason.splitlines()[0]}" for entry, reason in packaged.rejected.items()]
    lines += ["", "ops"]
    for spec in library.specs():
        lines += [f"  {spec.qualname}  {spec.formula}"]
        for name, provider in registry.PROVIDERS.items():
            tensors = _on_device_of(name, spec)
            reason = provider.missing() or provider.refuses(spec, tensors)
            lines.append(f"    {name:<8}{'rejected: ' + reason if reason else 'accepted'}")
    return "\n".join(lines)


def _on_device_of(provider: str, spec: OpSpec) -> list[Imagined]:
    """Operands where the provider could run them: on the GPU, for one that a GPU platform prefers."""
    on_gpu = provider in registry.row("cuda") and provider != "native"
    device = torch.device("cuda" if on_gpu else "cpu")
    return _imagined(spec, (8, 64), torch.float32, device)


def _imagined(spec: OpSpec, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Imagined]:
    """Operands of the op whose first has this shape; the others fit it."""
    logical = logical_shape(spec.inputs[0].layout, shape) or tuple(shape)
    shapes = {Layout.vector: logical[-1:], Layout.scalar: (1,)}
    return [Imagined(shapes.get(input.layout, shape), dtype, device) for input in spec.inputs]


def _shown(args: argparse.Namespace) -> str:
    spec = library.find(args.op)
    spec = spec.backward if args.gradient else spec
    if args.provider:
        return registry.provider(args.provider, f"--provider {args.provider}").source(spec).rstrip()
    lines = [spec.qualname]
    lines += [f"  {spec.doc}" + (f" ({spec.source})" if spec.source else "")] if spec.doc else []
    lines += [f"  schema     {spec.schema}", f"  formula    {spec.formula}"]
    if spec.forward is None:
        lines += [f"  gradient   {', '.join(map(str, spec.backward.exprs))}"]
        if spec.backward_from_output is not None:
            lines += [f"  ... from y {', '.join(map(str, spec.backward_from_output.exprs))}"]
        lines += [f"  pattern    {spec.expr}"]
    lines += [f"  rounding   {'exact' if spec.exact else 'rounds_once'}", f"  hash       {spec.hash}"]
    lines += ["", "native reference", registry.PROVIDERS["native"].source(spec).rstrip()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
