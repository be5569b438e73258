"""State that a trace of a forward could bake in: a fused module does what the module does, before and after it changes.

Each case is a forward and what happens to its module later. Fusing may rewrite the forward or leave it alone; it may
never answer otherwise than the module that was not fused.
"""

from __future__ import annotations

import copy
import functools
import gc
import io
import math
import operator
import pickle
import subprocess
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao import quantization
from torch.nn.utils import parametrize, prune
from torch.utils._pytree import tree_flatten

import relu2ir

Change = Callable[[Any], object]
FUSED, SKIPPED = "fused", "skipped"


class MLP(nn.Module):
    """An op between two layers. ``gain`` is a tensor of the module's own, and 2 when it is counted twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.drop, self.down = nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4)
        self.gain = nn.Parameter(torch.full((8,), 1.5))

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(self.drop(self.gain * self.act(self.up(x)) ** 2))


@dataclass(frozen=True)
class Case:
    """A module, what fusing reports (FUSED, SKIPPED, or words of a near miss), what then happens to it.

    ``fails`` says why it fails yet.
    """

    kind: type[nn.Module]
    found: str | None
    changes: tuple[Change, ...]
    fails: str


CASES: dict[str, Case] = {}


def case(found: str | None, *changes: Change, fails: str = "") -> Callable[[Any], Any]:
    """Make a case of a class, or of the forward of an `MLP`."""

    def add(defined: Any) -> Any:
        kind = defined if isinstance(defined, type) else type(defined.__name__, (MLP,), {"forward": defined})
        CASES[defined.__name__] = Case(kind, found, changes, fails)
        return defined

    return add


def ran(module: nn.Module, *args: Any, **kwargs: Any) -> list[Any]:
    """What calling ``module`` does: its outputs, its arguments afterwards, all gradients, the random state."""
    torch.manual_seed(1)
    leaves = [arg.clone().requires_grad_(arg.is_floating_point()) for arg in args]
    given = [leaf.clone() for leaf in leaves]
    module.zero_grad()
    values, structure = tree_flatten(module(*given, **kwargs))
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
    if tensors:
        torch.autograd.backward(tensors, [torch.ones_like(tensor) for tensor in tensors])
    gradients = [leaf.grad for leaf in leaves] + [parameter.grad for parameter in module.parameters()]
    return [structure, *values, *given, *gradients, torch.get_rng_state()]


def same(found: list[Any], expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(map(_equal, found, expected))


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and one == other
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    return one.is_meta or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def twins(kind: type[nn.Module]) -> tuple[nn.Module, relu2ir.FuseResult]:
    """A module, and another that is the same, fused."""
    torch.manual_seed(0)
    module = kind()
    torch.manual_seed(0)
    return module, relu2ir.fuse(kind())


def outcome(result: relu2ir.FuseResult) -> str:
    if result.sites:
        return FUSED
    return result.near_misses[0].detail if result.near_misses else SKIPPED


def put(**attributes: Any) -> Change:
    """A change that sets attributes."""
    return lambda module: [setattr(module, name, value) for name, value in attributes.items()]


# What the forward calls.


@case(FUSED, nn.Module.eval, nn.Module.train)
def drops_out_below(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down(self.drop(F.relu(self.up(x)) ** 2))


@case(None, put(activation=torch.tanh))
class MethodReplaced(MLP):
    def activation(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x) ** 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.up(x)))


@case("reads self.scaled", lambda module: setattr(type(module), "scale", 7.0))
class ClassMethod(MLP):
    scale = 2.0

    @classmethod
    def scaled(cls, x: torch.Tensor) -> torch.Tensor:
        return x * cls.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.scaled(F.relu(self.up(x)) ** 2))


class Scaled(MLP):
    scale = 2.0


@case("reads super().scale", lambda module: setattr(Scaled, "scale", 7.0))
class AttributeOfSuper(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(super().scale * F.relu(self.up(x)) ** 2)


@case(FUSED)
class ForwardOfSuper(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


@case(FUSED)
class StaticMethodAndProperty(MLP):
    @staticmethod
    def squared(x: torch.Tensor) -> torch.Tensor:
        return F.relu(x) ** 2

    @property
    def first(self) -> nn.Module:
        return self.up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.squared(self.first(x)))


@case("reads self.squared")
class CachedMethod(MLP):
    @functools.lru_cache  # noqa: B019
    def squared(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x) ** 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.squared(self.up(x)))


@case("is decorated")
class Cached(MLP):
    @functools.lru_cache  # noqa: B019
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)) ** 2)


def doubled(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(self: Any, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x) * 2

    return call


@case(FUSED)
class DecoratedWithoutATrace(MLP):
    @doubled
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)) ** 2)


def halved(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down(torch.tanh(self.up(x))) / 2


@case(None, lambda module: setattr(type(module), "forward", halved))
def patched_in_its_class(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down(F.relu(self.up(x)) ** 2)


class Tanh(MLP):
    forward = halved


@case(None, put(__class__=Tanh))
def of_another_class(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down(F.relu(self.up(x)) ** 2)


@case(FUSED, lambda module: setattr(module, "forward", functools.partial(halved, module)))
def patched(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down(F.relu(self.up(x)) ** 2)


def relu2(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x) ** 2


@case(None, lambda module: globals().update(relu2=torch.tanh), fails="a function is not looked for again")
def calls_a_function(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down(relu2(self.up(x)))


def closing_over(activation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down(activation(self.up(x)))

    return forward


def close_over_tanh(module: nn.Module) -> None:
    type(module).forward.__closure__[0].cell_contents = torch.tanh


@case(None, close_over_tanh, fails="a function is not looked for again")
class ClosesOver(MLP):
    forward = closing_over(lambda x: F.relu(x) ** 2)


def scaled_relu2(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x) ** 2 * scaled_relu2.scale  # type: ignore[attr-defined]


scaled_relu2.scale = 2.0  # type: ignore[attr-defined]


@case("reads scaled_relu2.scale", lambda module: setattr(scaled_relu2, "scale", 7.0))
def calls_a_function_with_an_attribute(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down(scaled_relu2(self.up(x)))


WIDE = torch.float64


@case(None, lambda module: globals().update(WIDE=torch.float32), fails="a global is not looked at again")
def casts_to_a_global_type(self: Any, x: torch.Tensor) -> torch.Tensor:
    return (F.relu(self.up(x)) ** 2).to(WIDE)


class Root(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)) ** 2)


@case(None, lambda module: setattr(Root, "forward", halved))
class RootPatched(Root):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


# What the forward reads.


def by_mode(module: nn.Module, h: torch.Tensor) -> torch.Tensor:
    return module.down(h) if module.training else h


@case("reads self.training", nn.Module.eval)
def asks_a_function_for_the_mode(self: Any, x: torch.Tensor) -> torch.Tensor:
    return by_mode(self, F.relu(self.up(x)) ** 2)


COUNTS: list[int] = []


@case("reads COUNTS")
def counts_in_a_global(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    COUNTS.append(1)
    return self.down(F.relu(self.up(x)) ** 2), COUNTS[0]


@case("__getattr__ of its class")
class OwnGetattr(MLP):
    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        return value * 2 if name == "gain" else value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gain * F.relu(self.up(x)) ** 2)


@case("reads self.extra", put(extra=4.0))
class Slots(MLP):
    __slots__ = ("extra",)

    def __init__(self) -> None:
        super().__init__()
        self.extra = 3.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)) ** 2) * self.extra


@case(FUSED, put(act=nn.Tanh()), put(act=nn.Sequential(nn.ReLU(), nn.Tanh())), put(gain=nn.Parameter(torch.ones(8))))
def child_and_parameter_replaced(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down(self.gain * self.act(self.up(x)) ** 2)


@case(FUSED, lambda module: setattr(module.up, "bias", None))
def parameters_of_a_child(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down(F.relu(F.linear(x, self.up.weight, self.up.bias)) ** 2)


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def parametrize_gain(module: Any) -> None:
    parametrize.register_parametrization(module, "gain", Doubled())


def parametrize_up(module: Any) -> None:
    parametrize.register_parametrization(module.up, "weight", Doubled())


def drop_gain(module: Any) -> None:
    """Back to the parameter before it was doubled."""
    parametrize.remove_parametrizations(module, "gain", leave_parametrized=False)


@case(FUSED, parametrize_gain, parametrize_up, drop_gain)
def parametrized_later(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down(self.gain * F.relu(F.linear(x, self.up.weight)) ** 2)


@case(None, drop_gain)
class Parametrized(MLP):
    def __init__(self) -> None:
        super().__init__()
        parametrize_gain(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gain * F.relu(self.up(x)) ** 2)


# Modules of torch's with a forward of their own: what torch's code reads of them is theirs to change.


@case("reads self.", nn.Module.eval)
class DropsOut(nn.Dropout):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.relu(x) ** 2)


@case(SKIPPED, put(inplace=True))
class InPlace(nn.ReLU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) ** 2


@case("reads self.bias", put(bias=nn.Parameter(torch.ones(4))))
class WithoutBias(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(super().forward(x)) ** 2


@case("reads self.", put(stride=(2,)))
class Strided(nn.Conv1d):
    def __init__(self) -> None:
        super().__init__(3, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self._conv_forward(x, self.weight, self.bias)) ** 2


@case(SKIPPED, nn.Module.eval)
class Normed(nn.BatchNorm1d):
    def __init__(self) -> None:
        super().__init__(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(super().forward(x)) ** 2


@case("reads self._modules", lambda module: module.append(nn.Tanh()))
class List(nn.ModuleList):
    def __init__(self) -> None:
        super().__init__([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
        return F.relu(x) ** 2


@case("reads self._modules", lambda module: module.update({"c": nn.Tanh()}))
class Dict(nn.ModuleDict):
    def __init__(self) -> None:
        super().__init__({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.values():
            x = layer(x)
        return F.relu(x) ** 2


@case("reads self.scale", put(_scale=7.0))
class PropertyInC(MLP):
    scale = property(operator.attrgetter("_scale"))

    def __init__(self) -> None:
        super().__init__()
        self._scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)) ** 2) * self.scale


# What the forward does with its arguments.


@case(SKIPPED)
def argument_named_torch(self: Any, torch: Any) -> Any:
    return self.down(F.relu(self.up(torch)) ** 2)


@case(SKIPPED)
def argument_named_inf(self: Any, inf: torch.Tensor) -> torch.Tensor:
    return self.down(F.relu(self.up(inf)) ** 2).clamp(max=float("inf"))


@case(FUSED)
def arguments_named_as_the_nodes(self: Any, relu_squared: torch.Tensor, relu: Any = torch.float64) -> torch.Tensor:
    return (F.relu(relu_squared) ** 2 + relu_squared).to(relu)


@case("has a default")
def takes_a_function(self: Any, x: torch.Tensor, act: Callable[..., torch.Tensor] = torch.relu) -> torch.Tensor:
    return self.down(F.relu(self.up(x)) ** 2) + act(x)


@case(FUSED)
def takes_numbers(self: Any, x: torch.Tensor, dims: Any = (0, -1), high: float = math.inf) -> torch.Tensor:
    return self.down(F.relu(self.up(x)) ** 2).sum(dims).clamp(max=high)


def other_default(module: Any) -> None:
    type(module).forward.__defaults__ = (4.0,)


@case(None, other_default)
def default_replaced(self: Any, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    return self.down(F.relu(self.up(x)) ** 2) * scale


def mutate_default(module: Any) -> None:
    type(module).forward.__defaults__[0][0] = 5.0


@case("has a default", mutate_default)
def mutable_default(self: Any, x: torch.Tensor, scales: list[float] = [2.0]) -> torch.Tensor:  # noqa: B006
    return self.down(F.relu(self.up(x)) ** 2) * scales[0]


@case(FUSED)
def keyword_only_with_a_default(self: Any, x: torch.Tensor, y: int = 2, *, scale: int = 3) -> torch.Tensor:
    return self.down(F.relu(self.up(x)) ** 2) * scale * y


@case(SKIPPED)
class KeywordOnly(MLP):
    def forward(self, x: torch.Tensor, y: int = 2, *, scale: int) -> torch.Tensor:
        return self.down(F.relu(self.up(x)) ** 2) * scale * y

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x, scale=3)


@case(FUSED)
class AnyArguments(MLP):
    def forward(self, x: torch.Tensor, /, *args: float, **kwargs: float) -> torch.Tensor:
        return self.down(F.relu(self.up(x)) ** 2) * args[0] * kwargs["scale"]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x, 2.0, scale=3.0)


@case(SKIPPED)
def branches_on_a_shape(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = F.relu(self.up(x)) ** 2
    return self.down(h) if x.shape[0] == 3 else h


@case(SKIPPED)
def branches_on_a_dtype(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = F.relu(self.up(x)) ** 2
    return self.down(h) if x.dtype == torch.float32 else h


@case(SKIPPED)
def branches_on_a_device(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = F.relu(self.up(x)) ** 2
    return self.down(h) if x.device.type == "cpu" else h


@case(SKIPPED)
def branches_on_data(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = F.relu(self.up(x)) ** 2
    return self.down(h) if x.sum() > -100 else h


@case(SKIPPED)
def raises(self: Any, x: torch.Tensor) -> torch.Tensor:
    if x.dim() == 1:
        raise ValueError(f"a tensor of rank {x.dim()}")
    return self.down(F.relu(self.up(x)) ** 2)


@case("reads __class__")
def branches_on_a_class(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = F.relu(self.up(x)) ** 2
    return self.down(h) if x.__class__.__name__ == "Tensor" else h


@case("makes text")
def writes_an_f_string(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, str]:
    return self.down(F.relu(self.up(x)) ** 2), f"rank {x.dim()}"


@case("makes text")
def formats(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, str]:
    return self.down(F.relu(self.up(x)) ** 2), "rank {}".format(x.dim())  # noqa: UP032


@case("makes text")
def formats_with_percent(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, str]:
    return self.down(F.relu(self.up(x)) ** 2), "rank %s" % x.dim()  # noqa: UP031


@case(FUSED)
def reads_a_number(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down(F.relu(self.up(x)) ** 2) * x.sum().item() / math.sqrt(x.shape[-1])


@case(FUSED)
def writes_to_its_argument(self: Any, x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return self.down(F.relu(self.up(x)) ** 2) + x


@case("write to the op's input")
def writes_inside_the_spelling(self: Any, x: torch.Tensor) -> torch.Tensor:
    r = F.relu(x)
    x.mul_(2)
    return r**2 + x


@case("calls numpy.float32")
def calls_numpy(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down(F.relu(self.up(x)) ** 2) + numpy.float32(2)


@case("calls torch.jit.is_tracing")
def asks_whether_it_is_traced(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = F.relu(self.up(x)) ** 2
    return h if torch.jit.is_tracing() else self.down(h)


@case(FUSED)
def draws(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down(F.dropout(F.relu(self.up(x)) ** 2, 0.5))


@case("calls Manual")
def in_a_context_of_its_own(self: Any, x: torch.Tensor) -> torch.Tensor:
    with Manual():
        return self.down(F.relu(self.up(x)) ** 2) * Manual.scale


class Manual:
    scale = 1.0

    def __enter__(self) -> None:
        Manual.scale = 3.0

    def __exit__(self, *error: object) -> None:
        Manual.scale = 1.0


@case(SKIPPED)
class Generates(MLP):
    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield self.down(F.relu(self.up(x)) ** 2)

    def __call__(self, x: torch.Tensor) -> list[torch.Tensor]:
        return list(super().__call__(x))


@case(FUSED)
def generates_inside(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down(sum(F.relu(h) ** 2 for h in (self.up(x), self.up(-x))))


@case(FUSED)
def returns_a_tree(self: Any, x: torch.Tensor) -> dict[str, Any]:
    return {"h": self.down(F.relu(self.up(x)) ** 2), "none": None, "shape": x.shape, "x": [x, (x, 1)]}


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@case("calls Pair")
def returns_a_named_tuple(self: Any, x: torch.Tensor) -> Pair:
    return Pair(self.down(F.relu(self.up(x)) ** 2), x)


def cases() -> list[Any]:
    return [
        pytest.param(each, id=name, marks=[pytest.mark.xfail(strict=True, reason=each.fails)] if each.fails else [])
        for name, each in CASES.items()
    ]


@pytest.mark.parametrize("each", cases())
def test_a_fused_module_does_what_the_module_does_before_and_after_each_change(each: Case) -> None:
    module, result = twins(each.kind)
    x = torch.randn(3, 4)
    before = ran(module, x)
    assert same(ran(result.module, x), before)
    if each.found is not None:
        assert outcome(result) == each.found or each.found in outcome(result)
    for change in each.changes:
        change(module), change(result.module)
        after = ran(module, x)
        assert not same(after, before), "the change changes something"
        assert same(ran(result.module, x), after)
        before = after


# What happens to a whole model, whatever is fused in it.


class Squared(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.square(F.relu(x))


class Model(nn.Module):
    """A forward that is rewritten, an activation that becomes a layer, and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.act, self.last = MLP(), Squared(), nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.act(self.mlp(x) + self.shift))


def load(module: nn.Module, **how: Any) -> None:
    torch.manual_seed(2)
    module.load_state_dict({name: torch.randn_like(value) for name, value in module.state_dict().items()}, **how)


def fill(module: nn.Module) -> None:
    module.to_empty(device="cpu")
    for tensor in module.state_dict().values():
        tensor.fill_(0.25)


def forget_the_tensors(module: nn.Module) -> None:
    """Other tensors of the same names, as an optimizer that flattens parameters puts them."""
    for each in module.modules():
        for name, parameter in each.named_parameters(recurse=False):
            setattr(each, name, nn.Parameter(parameter.detach() * 2))


TENSORS: dict[str, Change] = {
    "double": nn.Module.double,
    "half": nn.Module.half,
    "bfloat16": nn.Module.bfloat16,
    "meta": lambda module: module.to("meta"),
    "load_state_dict": load,
    "load_state_dict(assign=True)": lambda module: load(module, assign=True),
    "requires_grad_": lambda module: module.requires_grad_(False),
    "of a child": lambda module: module.mlp.up.requires_grad_(False),
    "to_empty": fill,
    "other parameters": forget_the_tensors,
    "eval": nn.Module.eval,
    "eval of a child": lambda module: module.mlp.eval(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_what_is_done_to_the_tensors_is_done_to_the_fused_ones(name: str) -> None:
    model, result = twins(Model)
    assert len(result.sites) == 2
    x = torch.randn(3, 4)
    before = ran(model, x)
    TENSORS[name](model), TENSORS[name](result.module)
    given = x.to(model.last.weight)
    assert not same(ran(model, given), before)
    assert same(ran(result.module, given), ran(model, given))
    assert result.module.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("x", [torch.ones(2, 3, 4), torch.ones(0, 4), torch.full((2, 4), torch.nan)])
def test_other_inputs_give_what_they_gave(x: torch.Tensor) -> None:
    model, result = twins(Model)
    assert same(ran(result.module, x), ran(model, x))


@pytest.mark.parametrize(("kind", "x"), [(Model, torch.ones(2, 3)), (CASES["raises"].kind, torch.ones(4))])
def test_errors_are_those_of_the_model(kind: type[nn.Module], x: torch.Tensor) -> None:
    errors = []
    model, result = twins(kind)
    for module in (model, result.module):
        with pytest.raises((ValueError, RuntimeError)) as error:
            module(x)
        errors.append((error.type, str(error.value)))
    assert errors[0] == errors[1]


def test_copies_and_pickles_do_what_the_model_does() -> None:
    model, result = twins(Model)
    x = torch.randn(3, 4)
    for again in (copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), saved):
        other = again(result.module)
        assert same(ran(other, x), ran(model, x))
        other.eval().double()
        assert same(ran(other, x.double()), ran(copy.deepcopy(model).eval().double(), x.double()))
        assert same(ran(result.module, x), ran(model, x))


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_functions_of_the_parameters_take_a_fused_model() -> None:
    model, result = twins(Model)
    x = torch.randn(3, 4)
    values = {name: 2 * parameter.detach() for name, parameter in model.named_parameters()}

    def called(module: nn.Module, values: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(module.eval(), values, (x,)).sum()

    expected, found = (torch.func.grad(called, argnums=1)(module, values) for module in (model, result.module))
    assert all(torch.equal(found[name], expected[name]) for name in values)
    assert torch.equal(called(result.module, values), called(model, values))

    def ensemble(modules: list[nn.Module]) -> torch.Tensor:
        stacked = torch.func.stack_module_state(modules)
        plain = copy.deepcopy(modules[0]).to("meta")
        return torch.vmap(lambda *state: torch.func.functional_call(plain, state, (x,)))(*stacked)

    others = twins(Model)
    load(others[0]), load(others[1].module)
    pairs = ([model, others[0].eval()], [result.module, others[1].module.eval()])
    assert torch.equal(ensemble(pairs[1]), ensemble(pairs[0]))


# Hooks, before fusing and after it. A layer of an op is of another class, which a hook sees.

LOG: list[Any] = []


def on_every_module(register: Callable[[str, nn.Module], object]) -> Change:
    return lambda model: [register(name, module) for name, module in model.named_modules()]


def log_and_double(name: str, *what: Any) -> Any:
    LOG.append((name, *what[:-1]))
    return what[-1]


def doubled_all(values: Any) -> Any:
    return tuple(value if value is None else value * 2 for value in values)


HOOKS: dict[str, Callable[[str, nn.Module], object]] = {
    "forward": lambda name, m: m.register_forward_hook(lambda _, args, out: log_and_double(name, len(args), out * 2)),
    "forward with keywords": lambda name, m: m.register_forward_hook(
        lambda _, args, kwargs, out: log_and_double(name, len(args), sorted(kwargs), out * 2), with_kwargs=True
    ),
    "forward always": lambda name, m: m.register_forward_hook(
        lambda _, args, out: log_and_double(name, None), always_call=True
    ),
    "pre": lambda name, m: m.register_forward_pre_hook(lambda _, args: log_and_double(name, doubled_all(args))),
    "pre with keywords": lambda name, m: m.register_forward_pre_hook(
        lambda _, args, kwargs: log_and_double(name, (doubled_all(args), kwargs)), with_kwargs=True
    ),
    "backward": lambda name, m: m.register_full_backward_hook(
        lambda _, given, grads: log_and_double(name, len(given), doubled_all(given))
    ),
    "backward pre": lambda name, m: m.register_full_backward_pre_hook(
        lambda _, grads: log_and_double(name, doubled_all(grads))
    ),
    "state": lambda name, m: (
        m.register_state_dict_pre_hook(lambda _, prefix, keep: log_and_double(name, prefix, None)),
        m.register_state_dict_post_hook(lambda _, state, prefix, meta: log_and_double(name, len(state), None)),
        m.register_load_state_dict_post_hook(lambda _, keys: log_and_double(name, None)),
    ),
}


def logged(module: nn.Module, x: torch.Tensor) -> tuple[list[Any], list[Any]]:
    LOG.clear()
    done = ran(module, x)
    module.load_state_dict(module.state_dict())
    return done, list(LOG)


@pytest.mark.parametrize(
    ("name", "when"),
    [(name, when) for name in HOOKS for when in ("before", "after")],
)
def test_hooks_run_as_they_would(name: str, when: str) -> None:
    hook = on_every_module(HOOKS[name])
    torch.manual_seed(0)
    model, x = Model(), torch.randn(3, 4)
    bare = logged(model, x)
    other = copy.deepcopy(model)
    hook(model)
    if when == "before":
        hook(other)
    fused = relu2ir.fuse(other).module
    if when == "after":
        hook(fused)
    (found, seen), (expected, calls) = logged(fused, x), logged(model, x)
    assert same(found, expected) and seen == calls and calls
    assert not bare[1]


def test_partials_of_a_module_are_those_of_the_copy() -> None:
    """As accelerate patches a forward, and as hooks are bound."""

    class Patched(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.written = self.forward
            self.forward = functools.update_wrapper(functools.partial(by_scale, self), self.written)
            self.down.register_forward_hook(functools.partial(scale_by_mode, self))

    model, result = twins(Patched)
    x = torch.randn(3, 4)
    assert same(ran(result.module, x), ran(model, x))
    model.eval(), result.module.eval()
    assert same(ran(result.module, x), ran(model, x))


def by_scale(module: Any, *args: torch.Tensor) -> torch.Tensor:
    return module.written(*args) * (2 + module.training)


def scale_by_mode(owner: nn.Module, module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
    return out * (3 + owner.training)


class Held(NamedTuple):
    module: nn.Module


HOLDERS: dict[str, Callable[[nn.Module], Any]] = {
    "list": lambda module: [[module]],
    "dict": lambda module: {"module": (module,)},
    "method": lambda module: module.forward,
    "set": lambda module: {module},
    "deque": lambda module: deque([module]),
    "defaultdict": lambda module: defaultdict(list, {"module": [module]}),
    "named tuple": Held,
    "namespace": lambda module: SimpleNamespace(module=module),
    "partial": lambda module: functools.partial(type(module).forward, module),
    "hidden ModuleList": lambda module: [nn.ModuleList([module])],
}
RELINKED = ("list", "dict", "method", "partial")
NOT_RELINKED = pytest.mark.xfail(strict=True, reason="only lists, tuples, dicts, methods and partials are looked into")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in RELINKED else [NOT_RELINKED]) for name in HOLDERS]
)
def test_what_a_module_holds_of_its_children_is_the_copies(name: str) -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = MLP()
            self.held = HOLDERS[name](self.mlp)

    fused = relu2ir.fuse(Holds()).module
    # Who can be reached from there: the same as in a deepcopy, whose children are its own.
    assert reached(fused.held) == {id(fused.mlp)}
    again = copy.deepcopy(fused)
    assert reached(again.held) == {id(again.mlp)}


def reached(value: Any) -> set[int]:
    """The ids of the MLPs to which ``value`` leads."""
    found: set[int] = set()
    seen: set[int] = set()
    open_values = [value]
    while open_values:
        each = open_values.pop()
        if isinstance(each, MLP):
            found.add(id(each))
        elif id(each) not in seen and not isinstance(each, type | FunctionType | ModuleType):
            seen.add(id(each))
            open_values += gc.get_referents(each)
    return found


def test_an_activation_with_more_than_a_forward_keeps_it() -> None:
    class Invertible(Squared):
        limit = 4.0

        def inverse(self, y: torch.Tensor) -> torch.Tensor:
            return y.sqrt().clamp(max=self.limit)

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = Invertible()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act.inverse(self.act(x)) * self.act.limit

    model, result = twins(Uses)
    x = torch.randn(3, 4)
    assert same(ran(result.module, x), ran(model, x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of Dynamo
@pytest.mark.parametrize(
    "how",
    [
        "torch.compile",
        "compile()",
    ],
)
def test_a_compiled_module_below_does_what_it_did(how: str) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = MLP()
            if how == "torch.compile":
                self.mlp = torch.compile(self.mlp, backend="eager")
            else:
                self.mlp.compile(backend="eager")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mlp(x)

    torch._dynamo.reset()
    model, result = twins(Outer)
    x = torch.randn(3, 4)
    assert same(ran(result.module, x), ran(model, x))
    model.eval(), result.module.eval()
    assert same(ran(result.module, x), ran(model, x))


# What libraries do to a model, before it is fused and after.


class LoRA(nn.Module):
    """A layer with a learnt difference, as PEFT wraps one."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.active, self.scaling = layer, ["default"], {"default": 0.5}
        self.a = nn.ModuleDict({"default": nn.Linear(layer.in_features, 2, bias=False)})
        self.b = nn.ModuleDict({"default": nn.Linear(2, layer.out_features, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base_layer(x)
        for name in self.active:
            y = y + self.b[name](self.a[name](x)) * self.scaling[name]
        return y


class Wrapped(nn.Module):
    """A module behind another name, as FSDP and its like wrap one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._fsdp_wrapped_module, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._fsdp_wrapped_module(*args, **kwargs)


def adapted(module: Any) -> None:
    module.up, module.down = LoRA(module.up), LoRA(module.down)


def pruned(module: Any) -> None:
    prune.random_unstructured(module.up, "weight", 0.5)


def pruned_for_good(module: Any) -> None:
    pruned(module)
    prune.remove(module.up, "weight")


def fused_with_batch_norm(module: Any) -> None:
    norm = nn.BatchNorm1d(8)
    norm.running_mean.normal_()
    module.eval()
    module.up = torch.nn.utils.fusion.fuse_linear_bn_eval(module.up, norm.eval())


def prepared(module: Any) -> nn.Module:
    module.qconfig = quantization.default_qconfig
    return quantization.prepare(module.eval())


def sharded_by_ddp(module: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module)


LIBRARIES: dict[str, Callable[[Any], nn.Module | None]] = {
    "weight_norm": lambda module: torch.nn.utils.parametrizations.weight_norm(module.up) and None,
    "weight_norm by a hook": lambda module: torch.nn.utils.weight_norm(module.up) and None,
    "spectral_norm": lambda module: torch.nn.utils.parametrizations.spectral_norm(module.up) and None,
    "spectral_norm by a hook": lambda module: torch.nn.utils.spectral_norm(module.up) and None,
    "pruned": pruned,
    "pruned for good": pruned_for_good,
    "fused with a batch norm": fused_with_batch_norm,
    "quantized": lambda module: quantization.quantize_dynamic(module, {nn.Linear}),
    "prepared for quantization": prepared,
    "fused for quantization": lambda module: quantization.fuse_modules(module.eval(), [["up", "act"]]),
    "LoRA": adapted,
    "wrapped": Wrapped,
    "DataParallel": nn.DataParallel,
    "DistributedDataParallel": sharded_by_ddp,
}


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """This process as a group of one."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", LIBRARIES)
def test_what_libraries_do_to_a_model_works_before_fusing_and_after(name: str) -> None:
    def done(module: nn.Module) -> nn.Module:
        torch.manual_seed(3)
        return LIBRARIES[name](module) or module

    x = torch.randn(3, 4)
    model = MLP()
    plain, other = ran(model, x), done(copy.deepcopy(model))
    expected = ran(other, x)
    assert same(expected, plain) == (name in ("wrapped", "DataParallel", "DistributedDataParallel"))
    after = relu2ir.fuse(copy.deepcopy(model))
    assert after.sites and same(ran(done(after.module), x), expected)
    before = relu2ir.fuse(done(copy.deepcopy(model)))
    assert same(ran(before.module, x), expected)
    other.eval(), before.module.eval()
    assert same(ran(before.module, x), ran(other, x))


THREADS = """
import threading, torch
from torch import nn
import relu2ir

class Squared(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x):
        return torch.square(torch.relu(self.up(x)))

lost = []

def fuse():
    for _ in range(25):
        lost.append(not relu2ir.fuse(Squared()).sites)

threads = [threading.Thread(target=fuse) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not any(lost), f"{sum(lost)} of {len(lost)} sites were lost"
nn.Linear(2, 2)(torch.ones(2))
"""


def test_models_are_fused_in_several_threads_at_once() -> None:
    """In a process of its own, where every later call of a module may fail."""
    root = Path(relu2ir.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
