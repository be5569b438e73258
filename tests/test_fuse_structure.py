"""A fused copy refers to itself, and never to the original, wherever the original referred to itself."""

from __future__ import annotations

import inspect

import torch
import torch.nn.functional as F
from torch import fx, nn

import relu2ir


class Gate(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.square(F.relu(x))


class Blocks(nn.Module):
    """Registered modules that stand in plain containers too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.d = nn.Linear(4, 4), nn.Dropout(0.5)
        self.blocks, self.pair, self.table = [self.a, self.d], (self.a, [self.d]), {"d": self.d}
        self.act, self.names = Gate(), ["a", "d"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.act(x)


def test_modules_in_plain_containers_are_the_copies() -> None:
    model = Blocks()
    fused = relu2ir.fuse(model).module
    assert fused.blocks[0] is fused.a and fused.blocks[1] is fused.d
    assert fused.pair[0] is fused.a and fused.pair[1][0] is fused.d and fused.table["d"] is fused.d
    assert model.blocks[1] is model.d and fused.names is model.names
    x = torch.randn(64, 4)
    assert torch.equal(fused.eval()(x), torch.square(F.relu(model.a(x))))
    assert model.d.training


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act, self.seen = Gate(), 0
        self.register_forward_hook(self.count)
        self.act.register_forward_pre_hook(self.count_child)
        self.register_load_state_dict_pre_hook(self.loading)

    def count(self, module: nn.Module, args: object, out: object) -> None:
        self.seen += 1

    def count_child(self, module: nn.Module, args: object) -> None:
        self.seen += 10

    def loading(self, module: nn.Module, *args: object) -> None:
        module.seen += 100
        self.seen += 1000

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x)


def test_methods_that_are_hooks_are_those_of_the_copy() -> None:
    model = Hooked()
    fused = relu2ir.fuse(model).module
    fused(torch.ones(2))
    fused.load_state_dict({})
    assert (model.seen, fused.seen) == (0, 1111)
    model(torch.ones(2))
    assert (model.seen, fused.seen) == (11, 1111)


def test_a_lazy_layer_is_left_to_its_first_call() -> None:
    model = nn.Sequential(nn.LazyLinear(4), Gate())
    result = relu2ir.fuse(model)
    assert [skipped.reason for skipped in result.skipped] == ["a lazy module before its first call"]
    x = torch.randn(3, 5)
    first = result.module(x)
    assert torch.equal(result.module(x), first)
    assert torch.equal(model(x), first)
    assert type(model[0]) is type(result.module[0]) is nn.Linear


def test_a_layer_can_be_traced_by_itself() -> None:
    layer = relu2ir.nn.ReLUSquared()
    assert str(inspect.signature(layer.forward)) == "(x)"
    x = torch.randn(3)
    assert torch.equal(fx.symbolic_trace(layer)(x), layer(x))
    assert torch.equal(torch.export.export(layer, (x,)).module()(x), layer(x))
    assert torch.equal(layer(hidden_states=x), layer(x))
