"""One of several processes: every op on distributed tensors, forward and backward, against whole ones.

``python tests/sharded.py RANK COUNT STORE``: gloo on the CPU.
"""

from __future__ import annotations

import sys
import warnings

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from relu2ir import library
from relu2ir.layout import whole_shape
from relu2ir.registry import provider
from relu2ir.spec import Layout, OpSpec


def placed(whole: Tensor, placement: Placement, mesh: DeviceMesh) -> DTensor:
    """``whole`` over the processes. Partial: a part of the sum on each."""
    if not isinstance(placement, Partial):
        return distribute_tensor(whole, mesh, [placement])
    return DTensor.from_local(whole * (0.75 if mesh.get_rank() else 0.25), mesh, [placement])


def check(spec: OpSpec, placement: Placement, mesh: DeviceMesh) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [whole_shape(input.layout, (4, 6)) for input in spec.inputs]
    wholes = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    leaves = [whole.clone().requires_grad_() for whole in wholes]
    expected = provider("native", "").lower(spec)(*leaves, *spec.params.values())
    weights = torch.linspace(-1, 2, expected.numel(), dtype=torch.float64).reshape(expected.shape)
    wanted = torch.autograd.grad(expected, leaves, weights)

    # What broadcasts lies whole everywhere.
    placements = [Replicate() if input.layout.broadcast else placement for input in spec.inputs]
    given = [placed(whole, each, mesh).requires_grad_() for whole, each in zip(wholes, placements)]
    out = library.function(spec.qualname)(*given)
    assert isinstance(out, DTensor)
    torch.testing.assert_close(out.full_tensor(), expected)
    found = torch.autograd.grad(out, given, distribute_tensor(weights, mesh, [Replicate()]))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.full_tensor(), other)


def main(rank: int, count: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    mesh = DeviceMesh("cpu", list(range(count)))
    for spec in library.specs():
        for placement in (Shard(0), Shard(1), Replicate(), Partial()):
            check(spec, placement, mesh)
    assert Layout.pairs in {input.layout for spec in library.specs() for input in spec.inputs}
    print(f"{len(library.specs())} ops")
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
