"""Fusing inside modules: outputs stay those of the original whatever is done to the model before or after."""

from __future__ import annotations

import copy
import inspect
import pickle
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import relu2ir
from relu2ir.fx.modules import FusedForward

LIMIT = 2.0


class Squared(nn.Module):
    """A whole activation module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        r = F.relu(x)
        return torch.square(r)


class MLP(nn.Module):
    """The op stands between two layers, written with an nn.ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.down(self.act(self.up(x)) ** 2)


class Model(nn.Module):
    """Both, and a dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.drop, self.act = MLP(), nn.Dropout(0.5), Squared()
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.drop(self.mlp(x)) + self.shift)


def test_a_flag_on_an_activation_module_stands_on_the_layer_too() -> None:
    act = Squared()
    act._is_initialized = True
    layer = relu2ir.fuse(nn.Sequential(act)).module[0]
    assert type(layer) is relu2ir.nn.ReLUSquared
    assert layer._is_initialized
    act.params = 3
    kept = relu2ir.fuse(nn.Sequential(act)).module[0]
    assert type(kept) is Squared, "an attribute that a layer has itself is not overwritten"
    assert kept.params == 3


def outputs(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)
    return model(x)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 4)


def test_activation_modules_are_swapped_and_forwards_rewritten(x: torch.Tensor) -> None:
    model = Model()
    result = relu2ir.fuse(model)
    assert [(site.path, site.spelling) for site in result.sites] == [
        ("mlp", "nn.ReLU()(x) ** 2"),
        ("act", "torch.square(F.relu(x))"),
    ]
    assert isinstance(result.module.act, relu2ir.nn.ReLUSquared)
    assert isinstance(result.module.mlp.forward, FusedForward)
    assert type(result.module) is Model and type(result.module.mlp) is MLP
    assert torch.equal(outputs(model, x), outputs(result.module, x))
    assert [site.provider for site in result.sites] == ["native", "native"]
    assert all(site.source.startswith(f"{__file__}:") for site in result.sites)


def test_the_original_is_untouched_and_its_tensors_are_shared() -> None:
    model = Model()
    state = {name: dict(vars(module)) for name, module in model.named_modules()}
    fused = relu2ir.fuse(model).module
    for name, module in model.named_modules():
        assert vars(module) == state[name]
    assert fused.state_dict().keys() == model.state_dict().keys()
    assert all(a is b for a, b in zip(model.parameters(), fused.parameters(), strict=True))
    assert all(a is b for a, b in zip(model.buffers(), fused.buffers(), strict=True))
    assert not set(model.modules()) & set(fused.modules())
    fused.train(False)
    assert model.training and model.mlp.training


def test_the_kernel_runs_in_both(x: torch.Tensor) -> None:
    fused = relu2ir.fuse(Model()).module
    seen: list[str] = []

    class Names(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Names():
        fused.mlp(x)
    assert "relu2ir.relu_squared.default" in seen


def test_dropout_follows_train_and_eval(x: torch.Tensor) -> None:
    model = Model()
    fused = relu2ir.fuse(model).module
    for training in (False, True):
        model.train(training), fused.train(training)
        assert torch.equal(outputs(model, x), outputs(fused, x))
    assert not torch.equal(outputs(fused, x), outputs(fused.eval(), x))


def test_training_steps_agree(x: torch.Tensor) -> None:
    models = [Model().eval() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    models[1] = relu2ir.fuse(models[1]).module
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


def test_state_loaded_afterwards_is_used(x: torch.Tensor) -> None:
    model, other = Model().eval(), Model().eval()
    fused = relu2ir.fuse(model).module
    fused.load_state_dict(other.state_dict())
    assert torch.equal(fused(x), other(x))
    fused.mlp.up = nn.Linear(4, 8)
    other.mlp.up = fused.mlp.up
    assert torch.equal(fused(x), other(x))


def test_hooks_run_as_before(x: torch.Tensor) -> None:
    model = Model().eval()
    calls: list[str] = []
    model.mlp.register_forward_hook(lambda module, args, out: calls.append("mlp") or out * 2)
    model.mlp.up.register_forward_pre_hook(lambda module, args: calls.append("up"))
    model.act.register_forward_hook(lambda module, args, out: calls.append("act") or out + 1)
    expected = model(x)
    before, calls[:] = list(calls), []
    result = relu2ir.fuse(model)
    assert torch.equal(result.module(x), expected)
    assert calls == before == ["up", "mlp", "act"]
    assert type(result.module.act) is Squared, "a hooked module keeps its class"


def test_a_hook_on_an_absorbed_relu_runs(x: torch.Tensor) -> None:
    model = MLP()
    model.act.register_forward_hook(lambda module, args, out: out + 1)
    result = relu2ir.fuse(model)
    assert [miss.reason for miss in result.near_misses] == ["hooked"]
    assert torch.equal(result.module(x), model(x))

    later = MLP()
    fused = relu2ir.fuse(later)
    assert len(fused.sites) == 1
    for module in (later, fused.module):
        module.act.register_forward_hook(lambda module, args, out: out + 1)
    assert torch.equal(fused.module(x), later(x))


def test_a_forward_of_an_absorbed_relus_own_runs(x: torch.Tensor) -> None:
    model = MLP()
    model.act.forward = lambda x: torch.relu(x) * 10  # type: ignore[method-assign]
    result = relu2ir.fuse(model)
    assert not result.sites
    assert torch.equal(result.module(x), model(x))

    later = MLP()
    fused = relu2ir.fuse(later)
    assert len(fused.sites) == 1
    for module in (later, fused.module):
        module.act.forward = lambda x: torch.relu(x) * 10  # type: ignore[method-assign]
    assert torch.equal(fused.module(x), later(x))


def test_a_call_of_an_activations_own_is_kept(x: torch.Tensor) -> None:
    class Shifted(Squared):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return super().__call__(x) + 1

    model = nn.Sequential(Shifted())
    result = relu2ir.fuse(model)
    assert type(result.module[0]) is Shifted
    assert torch.equal(result.module(x), torch.relu(x).square() + 1)


def test_a_global_module_hook_runs(x: torch.Tensor) -> None:
    fused = relu2ir.fuse(MLP()).module
    seen: list[type] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(type(module)))
    try:
        fused(x)
    finally:
        handle.remove()
    assert seen == [nn.Linear, nn.ReLU, nn.Linear, MLP]


def test_an_absorbed_relu_that_is_replaced_is_run(x: torch.Tensor) -> None:
    model = MLP()
    fused = relu2ir.fuse(model).module
    model.act = fused.act = nn.Tanh()
    assert torch.equal(fused(x), model(x))


def test_an_absorbed_relu_may_write_in_place_while_nothing_else_sees_it(x: torch.Tensor) -> None:
    model = MLP()
    model.act.inplace = True
    result = relu2ir.fuse(model)
    assert len(result.sites) == 1
    assert torch.equal(result.module(x), model(x))
    seen: list[torch.Tensor] = []
    result.module.up.register_forward_hook(lambda module, args, out: seen.append(out))
    result.module.act.inplace = False  # no longer what was absorbed: the module's own forward runs
    assert torch.equal(result.module(x), model(x))
    assert (seen[0] < 0).any()


def test_a_shared_module_stays_shared() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = MLP()
            self.b = self.a

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(self.b(x))

    result = relu2ir.fuse(Twice())
    assert result.module.a is result.module.b
    assert len(result.sites) == 1


class Masked(MLP):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        h = F.relu(self.up(x)).square()
        if mask is not None:
            h = h * mask
        return self.down(h)


class DropsWhenTraining(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.dropout(F.relu(self.up(x)).square(), 0.5, self.training))


class Scaled(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)).square() * self.scale)


class Counts(MLP):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x
        return self.down(F.relu(self.up(x)).square())


class Limited(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)).square() * LIMIT)


class ByType(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.up(x)).square()
        return self.down(h if isinstance(x, torch.Tensor) else -h)


class WithoutGradient(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            h = F.relu(self.up(x)).square()
        return self.down(h)


class GradMode(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.up(x)).square()
        return self.down(h) if torch.is_grad_enabled() else h


class Decorated(MLP):
    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)).square())


class Tries(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.down(F.relu(self.up(x)).square())
        except RuntimeError:
            return x


class Prints(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("called")
        return self.down(F.relu(self.up(x)).square())


class Draws(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)).square() + torch.rand(8))


class ReadsAChild(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)).square() * self.up.in_features)


class Walks(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.down(F.relu(x).square())


class AddsInPlace(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1  # writes to the caller's tensor; fx would record x + 1
        return self.down(F.relu(self.up(x)).square())


MODE_DEPENDENT = {
    AddsInPlace: "assigns with an operator",
    Masked: "compares with None",
    DropsWhenTraining: "reads self.training",
    Scaled: "reads self.scale",
    Counts: "stores an attribute",
    Limited: "reads LIMIT",
    ByType: "calls isinstance()",
    WithoutGradient: "calls torch.no_grad",
    GradMode: "calls torch.is_grad_enabled",
    Decorated: "is decorated",
    Tries: "has a try",
    Prints: "calls print()",
    Draws: "calls torch.rand",
    ReadsAChild: "reads self.in_features",
    Walks: "reads the members of an nn.Sequential",
}


@pytest.mark.parametrize("kind", MODE_DEPENDENT, ids=lambda kind: kind.__name__)
def test_a_forward_that_may_do_otherwise_is_left_alone(kind: type[MLP], capsys: pytest.CaptureFixture[str]) -> None:
    model = kind()
    attributes, random = dict(vars(model)), torch.get_rng_state()
    result = relu2ir.fuse(model)
    assert vars(model) == attributes
    assert torch.equal(torch.get_rng_state(), random)
    assert capsys.readouterr().out == "", "the forward ran"
    assert not result.sites
    (miss,) = result.near_misses
    assert miss.reason == "mode-dependent"
    assert MODE_DEPENDENT[kind] in miss.detail
    assert "torch.compile(model, backend='relu2ir')" in miss.detail
    assert miss.source == f"{__file__}:{inspect.unwrap(kind.forward).__code__.co_firstlineno}"


def test_a_mask_given_later_is_used(x: torch.Tensor) -> None:
    model = Masked()
    fused, mask = relu2ir.fuse(model).module, torch.rand(8)
    assert torch.equal(fused(x), model(x))
    assert torch.equal(fused(x, mask), model(x, mask))


def test_an_attribute_changed_later_is_used(x: torch.Tensor) -> None:
    model = Scaled()
    fused = relu2ir.fuse(model).module
    model.scale = fused.scale = 5.0
    assert torch.equal(fused(x), model(x))


def test_a_method_of_its_own_is_looked_into(x: torch.Tensor) -> None:
    class Methods(MLP):
        def activation(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(x).square()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.activation(self.up(x)))

    class Deep(Methods):
        def activation(self, x: torch.Tensor) -> torch.Tensor:
            return super().activation(x) if x is not None else x

    model = Methods()
    result = relu2ir.fuse(model)
    assert len(result.sites) == 1
    assert torch.equal(result.module(x), model(x))
    assert not relu2ir.fuse(Deep()).sites


def test_a_module_with_a_square_by_product_keeps_its_type_under_autocast(x: torch.Tensor) -> None:
    class Product(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            r = F.relu(x)
            return r * r

    model = Product()
    fused = relu2ir.fuse(model).module
    assert isinstance(fused.forward, FusedForward), "not a layer: CUDA autocast gives a product another type"
    seen: list[str] = []

    class Names(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    with Names(), torch.autocast("cpu", torch.bfloat16):
        fused(x)
    assert "relu" in seen and "relu_squared.default" not in seen
    assert torch.equal(fused(x), model(x))


def test_an_activation_module_with_more_than_the_op_is_not_swapped(x: torch.Tensor) -> None:
    class Named(Squared):
        def __init__(self) -> None:
            super().__init__()
            self.label = "relu2"

    model = Named()
    result = relu2ir.fuse(model)
    assert len(result.sites) == 1
    assert result.module.label == "relu2"
    assert torch.equal(result.module(x), model(x))


def test_a_deepcopy_owns_its_forward(x: torch.Tensor) -> None:
    fused = relu2ir.fuse(Model()).module.eval()
    copied = copy.deepcopy(fused)
    assert copied.mlp.forward.owner is copied.mlp
    with torch.no_grad():
        copied.mlp.up.weight.mul_(2)
    assert not torch.equal(copied(x), fused(x))


def test_a_shallow_copy_owns_its_forward_once_it_is_fused(x: torch.Tensor) -> None:
    shallow = copy.copy(relu2ir.fuse(MLP()).module)
    shallow._modules = {**shallow._modules, "up": nn.Linear(4, 8)}
    again = relu2ir.fuse(shallow).module
    assert torch.equal(again(x), MLP.forward(shallow, x))


def test_a_pickle_runs_the_forward_of_its_class_and_can_be_fused_again(x: torch.Tensor) -> None:
    fused = relu2ir.fuse(Model()).module.eval()
    loaded = pickle.loads(pickle.dumps(fused))
    assert isinstance(loaded.mlp.forward, MethodType)
    assert torch.equal(loaded(x), fused(x))
    again = relu2ir.fuse(pickle.loads(pickle.dumps(loaded)))
    assert [site.path for site in again.sites] == ["mlp"]
    assert torch.equal(again.module(x), fused(x))


def test_fusing_a_fused_module_changes_nothing(x: torch.Tensor) -> None:
    fused = relu2ir.fuse(Model()).module.eval()
    again = relu2ir.fuse(fused)
    assert not again.sites
    assert again.module.mlp.forward.owner is again.module.mlp
    assert torch.equal(again.module(x), fused(x))


def test_the_signature_stays() -> None:
    model = MLP()
    assert inspect.signature(relu2ir.fuse(model).module.forward) == inspect.signature(model.forward)


def test_a_replaced_forward_is_respected(x: torch.Tensor) -> None:
    model = Squared()
    model.forward = lambda x: x + 1  # type: ignore[method-assign]
    result = relu2ir.fuse(model)
    assert not result.sites
    assert torch.equal(result.module(x), x + 1)


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")
def test_a_fused_module_compiles_with_the_op_in_its_graph(x: torch.Tensor) -> None:
    model = Model().eval()
    fused, graphs = relu2ir.fuse(model).module, []

    def keep(graph_module: fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        graphs.append(graph_module)
        return graph_module.forward

    torch._dynamo.reset()
    out = torch.compile(fused, backend=keep, fullgraph=True)(x)
    assert torch.equal(out, model(x))
    assert graphs[0].code.count("relu2ir.relu_squared.default") == 2
    program = torch.export.export(fused, (x,))
    assert str(program.graph).count("relu2ir.relu_squared.default") == 2


def test_classes_are_not_registered_by_tracing() -> None:
    registered: list[str] = []

    class Registry(nn.Module):
        def __init_subclass__(cls, **kwargs: object) -> None:
            registered.append(cls.__name__)

    class Act(Registry):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(x) ** 2

    assert len(relu2ir.fuse(Act()).sites) == 1
    assert registered == ["Act"]
