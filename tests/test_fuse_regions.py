"""Ops inside the regions of a graph: bodies of cond, scan, checkpoint, autocast and their kin are looked into too."""

from __future__ import annotations

import io
import linecache
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._higher_order_ops import associative_scan, map, scan, while_loop
from torch._higher_order_ops.hints_wrap import hints_wrapper
from torch.export import ExportedProgram
from torch.utils.checkpoint import checkpoint

import relu2ir
from relu2ir import registry
from relu2ir.eager import forget
from relu2ir.fx.backend import relu2ir_backend
from relu2ir.fx.report import FuseResult

Tensors = list[torch.Tensor | None]
INNER = ("eager", "aot_eager")
# All are torch's own: of Dynamo over bodies and over autograd functions, of a checkpoint that is run without gradients.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning"),
]


class Squared(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.square(F.relu(x))


class Region(nn.Module):
    """What a region computes: a layer, and the op."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(4, 4), Squared()

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.up(x))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        r = F.relu(self.up(x))
        return r * r


class Cond(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: self.body(x), lambda x: self.body(-x) + 1, (x,))


class Scan(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def step(carry: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = self.body(row + carry)
            return carry * 0.5 + h, h.clone()

        carry, rows = scan(step, torch.zeros_like(x[0]), x)
        return carry + rows.sum(0)


class WhileLoop(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def step(i: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return i + 1, self.act(x) * 0.5

        return while_loop(lambda i, x: i < 3, step, (torch.zeros((), dtype=torch.int64), self.up(x)))[1]


class Map(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return map(lambda row: self.act(row), self.up(x))


class AssociativeScan(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return associative_scan(lambda a, b: self.act(a + b), self.up(x), 0, combine_mode="generic")


class ReentrantCheckpoint(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, use_reentrant=True)


class Checkpoint(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


class NestedCond(Region):
    """A body in a body."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def outer(x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.max() > 1, lambda x: x + 1, lambda x: self.act(x), (self.up(x),))

        return torch.cond(x.sum() > 0, outer, lambda x: x - 1, (x,))


class Autocast(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = self.body(x)
        return h.float() + 1


class NoGrad(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            h = self.body(x)
        return h * self.up(x)


class Vmap(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: self.act(row).sum())(self.up(x))


class Jvp(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(self.act, (x,), (self.up(x),))[1]


class FuncGrad(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda y: self.act(y).sum())(self.up(x))


@torch.compiler.nested_compile_region
def squared(x: torch.Tensor) -> torch.Tensor:
    return torch.square(F.relu(x))


class NestedCompileRegion(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return squared(h) + squared(2 * h)


class Hints(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return hints_wrapper(lambda x: self.act(x), (self.up(x),), {}, hints={"name": "act"})


class SavesItsInput(torch.autograd.Function):
    """The op in the forward, and an op, ``g * square(relu(x))``, in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.square(F.relu(x))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.square(F.relu(x))


class SavesTheRelu(torch.autograd.Function):
    """The backward reads the intermediate result of the forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        r = F.relu(x)
        ctx.save_for_backward(r)
        return torch.square(r)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (r,) = ctx.saved_tensors
        return 2 * r * grad


class AutogradFunction(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return SavesItsInput.apply(self.up(x))


class AutogradFunctionThatSavesTheRelu(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return SavesTheRelu.apply(self.up(x))


def step(call: Callable[..., torch.Tensor], model: nn.Module, x: torch.Tensor, grad: bool = True) -> Tensors:
    """The output and, with ``grad``, the gradient of the input and of every parameter."""
    model.zero_grad()
    leaf = x.clone().requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        out = call(leaf)
    if grad:
        out.sum().backward()
    return [out.detach(), leaf.grad, *(p.grad for p in model.parameters())]


def assert_same(found: Tensors, expected: Tensors) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def compiled(function: Callable[..., Any], inner: str) -> tuple[Callable[..., Any], list[FuseResult]]:
    torch._dynamo.reset()
    reports: list[FuseResult] = []
    options = {"inner": inner, "on_report": reports.append}
    return torch.compile(function, backend=relu2ir_backend, fullgraph=True, options=options), reports


def ops_of(graph_module: fx.GraphModule) -> list[str]:
    """The relu2ir ops of the graph and of every body below it."""
    graphs = [module.graph for module in graph_module.modules() if isinstance(module, fx.GraphModule)]
    targets = [node.target for graph in graphs for node in graph.nodes]
    return [t.name() for t in targets if isinstance(t, torch._ops.OpOverload) and t.namespace.startswith("relu2ir")]


def found(result: FuseResult) -> tuple[list[str], list[str]]:
    return [site.op.removeprefix("relu2ir::") for site in result.sites], [miss.reason for miss in result.near_misses]


def targets_of(graph_module: fx.GraphModule) -> list[str]:
    graphs = [module.graph for module in graph_module.modules() if isinstance(module, fx.GraphModule)]
    return [str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function"]


def marked(kinds: list[type[Region]], failing: dict[type[Region], str]) -> list[Any]:
    """``kinds`` as parameters, some with the reason why they fail yet."""
    return [
        pytest.param(
            kind,
            id=kind.__name__,
            marks=[pytest.mark.xfail(strict=True, reason=failing[kind])] if kind in failing else [],
        )
        for kind in kinds
    ]


OP = "relu_squared"
# The ops found and the near misses: by torch.compile, by torch.export; None where torch cannot export it.
REGIONS: dict[type[Region], tuple[tuple[list[str], list[str]], tuple[list[str], list[str]] | None]] = {
    Cond: (([OP, OP], []), ([OP, OP], [])),
    Scan: (([OP], []), ([OP], [])),
    WhileLoop: (([OP], []), ([OP], [])),
    Map: (([OP], []), ([OP], [])),
    AssociativeScan: (
        (["bias_relu_squared", OP], []),
        (["bias_relu_squared"] * 2, []),
    ),  # torch writes the combination out twice
    ReentrantCheckpoint: (([OP], []), ([OP], [])),
    Checkpoint: (([OP], []), ([OP], [])),
    NestedCond: (([OP], []), ([OP], [])),
    Autocast: (([OP], []), ([OP], [])),
    NoGrad: (([OP], []), ([OP], [])),
    Vmap: (([OP], []), ([OP], [])),
    Jvp: (([OP], []), None),
    FuncGrad: (([OP], []), None),
    NestedCompileRegion: (([OP], []), ([OP, OP], [])),  # one body, run twice; written out by torch.export
    Hints: (([OP], []), ([OP], [])),
    AutogradFunction: (([OP, "relu_squared_mul"], []), ([OP], [])),  # torch.export keeps no backward
    AutogradFunctionThatSavesTheRelu: (([], ["escapes"]), ([OP], [])),
}
CAPTURED = [kind for kind, (sites, _) in REGIONS.items() if sites[0]]
EXPORTED = [kind for kind, (_, sites) in REGIONS.items() if sites is not None]
# The op of these stands in a method or a function of the module itself.
WITHOUT_A_MODULE = (NestedCompileRegion, AutogradFunction)
# torch.export captures these bodies twice, and keeps the module and the line of the call only.
TWICE = (Cond, Scan, WhileLoop, Map, NestedCond, NestedCompileRegion)
# torch's own eager backend cannot differentiate these.
NO_GRADIENT = {(NestedCompileRegion, "eager"), (Hints, "eager"), (Hints, "aot_eager"), (WhileLoop, "aot_eager")}


class Outer(nn.Module):
    """A model that has the region in a layer."""

    def __init__(self, kind: type[Region]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([kind()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)


@cache
def captured(kind: type[Region], inner: str) -> tuple[FuseResult, Tensors, Tensors]:
    """The report of one compiled region, what it gave, and what the model itself gives."""
    torch.manual_seed(0)
    model, x, grad = Outer(kind), torch.randn(3, 4), (kind, inner) not in NO_GRADIENT
    call, reports = compiled(model, inner)
    given, expected = [], []
    for each in (x, -x):  # of cond, both branches
        given += step(call, model, each, grad)
        expected += step(model, model, each, grad)
    (report,) = reports
    return report, given, expected


@cache
def exported(kind: type[Region]) -> tuple[ExportedProgram, torch.Tensor, torch.Tensor]:
    """One exported region, an input, and what the model gives."""
    torch.manual_seed(0)
    model, x = Outer(kind), torch.randn(3, 4)
    return torch.export.export(model, (x,)), x, model(x)


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("kind", list(REGIONS), ids=lambda kind: kind.__name__)
def test_a_region_that_dynamo_captures_is_fused_with_its_gradients(kind: type[Region], inner: str) -> None:
    report, given, expected = captured(kind, inner)
    assert_same(given, expected)
    assert found(report) == REGIONS[kind][0]
    assert len(ops_of(report.module)) == len(report.sites)
    for module in report.module.modules():
        if isinstance(module, fx.GraphModule):
            module.graph.lint()


@pytest.mark.parametrize("kind", EXPORTED, ids=lambda kind: kind.__name__)
def test_a_region_of_an_exported_program_is_fused_saved_and_loaded(kind: type[Region]) -> None:
    program, x, expected = exported(kind)
    result = relu2ir.fuse(program)
    assert found(result) == REGIONS[kind][1]
    result.module.validate()
    assert torch.equal(result.module.module()(x), expected)
    if kind is not ReentrantCheckpoint:  # torch loads no program with a region that returns nothing, fused or not
        file = io.BytesIO()
        torch.export.save(result.module, file)
        file.seek(0)
        loaded = torch.export.load(file)
        assert len(ops_of(loaded.graph_module)) == len(result.sites)
        assert torch.equal(loaded.module()(x), expected)


@pytest.mark.parametrize("kind", EXPORTED, ids=lambda kind: kind.__name__)
def test_a_region_of_an_exported_program_is_lowered_to_what_it_was(kind: type[Region]) -> None:
    program, x, expected = exported(kind)
    plain = relu2ir.lower(relu2ir.fuse(program).module, providers="native")
    plain.validate()
    assert not ops_of(plain.graph_module)
    assert torch.equal(plain.module()(x), expected)
    assert targets_of(plain.graph_module) == targets_of(program.graph_module)
    assert found(relu2ir.find(plain)) == REGIONS[kind][1]


@pytest.mark.parametrize("kind", CAPTURED, ids=lambda kind: kind.__name__)
def test_a_site_in_a_captured_body_knows_its_module_and_its_line(kind: type[Region]) -> None:
    report, _, _ = captured(kind, "aot_eager")
    assert {site.path for site in report.sites} == {"layers.0" if kind in WITHOUT_A_MODULE else "layers.0.act"}
    assert all("torch.square(F.relu(x))" in line_of(site.source) for site in report.sites)


@pytest.mark.parametrize("kind", EXPORTED, ids=lambda kind: kind.__name__)
def test_a_site_in_an_exported_body_knows_its_module_and_its_line(kind: type[Region]) -> None:
    sites = relu2ir.find(exported(kind)[0]).sites
    inside = kind not in (*TWICE, AutogradFunction, AutogradFunctionThatSavesTheRelu)
    assert {site.path for site in sites} == {"layers.0.act" if inside else "layers.0"}
    assert all(("torch.square(" in line_of(site.source)) == (kind not in TWICE) for site in sites)


def line_of(source: str) -> str:
    """The line of this file at ``file:line``."""
    file, _, number = source.rpartition(":")
    assert file == __file__
    return linecache.getline(file, int(number))


class BesideCheckpoints(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = checkpoint(self.up, self.act(x), use_reentrant=False)
        return checkpoint(self.up, self.act(h), use_reentrant=False) + x


class BesideConds(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.cond(x.sum() > 0, self.up, lambda x: x + 1, (self.act(x),))
        return torch.cond(h.sum() > 0, self.up, lambda x: x + 1, (self.act(h),)) + x


class BesideScans(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def step(carry: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return carry + row, (row - carry) * x.mean()

        h, rows = scan(step, torch.zeros(4), self.act(x))
        return scan(step, h, self.act(rows))[1]


class BesideAutocast(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(x)
        with torch.autocast("cpu", torch.bfloat16):
            h = self.up(y)
        y = self.act(h)
        with torch.autocast("cpu", torch.bfloat16):
            return self.up(y) + x


class BesideNoGrad(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(x)
        with torch.no_grad():
            h = self.up(y)
        y = self.act(h + x)
        with torch.no_grad():
            return self.up(y) + x


class BesideNestedCompileRegions(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = tripled(self.act(x))
        return tripled(self.act(h)) + x


@torch.compiler.nested_compile_region
def tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 3


BESIDE = (
    BesideCheckpoints, BesideConds, BesideScans, BesideAutocast, BesideNoGrad, BesideNestedCompileRegions,
)  # fmt: skip


@pytest.mark.parametrize("kind", BESIDE, ids=lambda kind: kind.__name__)
def test_regions_that_write_nothing_cost_no_site_beside_them(kind: type[Region]) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(3, 4)
    call, reports = compiled(model, "aot_eager")
    assert torch.equal(call(x), model(x))
    result = relu2ir.fuse(torch.export.export(model, (x,)))
    assert torch.equal(result.module.module()(x), model(x))
    assert [found(report) for report in (*reports, result)] == [([OP, OP], [])] * 2


class WritesInNoGrad(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        r = F.relu(h)
        with torch.no_grad():
            h.add_(1)
        return torch.square(r) + self.act(h)


class WritesInAutocast(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.clone()
        r = F.relu(h)
        with torch.autocast("cpu", torch.bfloat16):
            h.add_(1)
        return torch.square(r) + self.act(h)


class WritesToAViewOfARegion(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.clone()
        with torch.autocast("cpu", torch.bfloat16):
            view = h.view(-1)
        r = F.relu(h)
        view.mul_(2)
        return torch.square(r) + self.act(h)


class WritesToTheResultOfARegion(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            r = F.relu(x)
        y = torch.square(r)
        r.mul_(2)
        return y + r


def add_one(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1) * 2


def flattened(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1)


class WritesInACheckpoint(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.clone()
        r = F.relu(h)
        y = checkpoint(add_one, h, use_reentrant=False)
        return torch.square(r) + self.act(h) + y


class ViewsInACheckpoint(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.clone()
        view = checkpoint(flattened, h, use_reentrant=False)
        r = F.relu(h)
        view.mul_(2)
        return torch.square(r) + self.act(h)


class WritesInANestedCompileRegion(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.clone()
        r = F.relu(h)
        y = nested_add_one(h)
        return torch.square(r) + self.act(h) + y


nested_add_one = torch.compiler.nested_compile_region(add_one)


class WritesInACond(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.clone()
        r = F.relu(h)
        y = torch.cond(x.sum() > -100, add_one, lambda x: x * 2, (h,))
        return torch.square(r) + self.act(h) + y


@pytest.mark.parametrize(
    "kind",
    [
        WritesInNoGrad,
        WritesInAutocast,
        WritesToAViewOfARegion,
        WritesToTheResultOfARegion,
        WritesInACheckpoint,
        ViewsInACheckpoint,
        WritesInANestedCompileRegion,
        WritesInACond,
    ],
    ids=lambda kind: kind.__name__,
)
def test_a_write_in_a_region_is_one_beside_it_too(kind: type[Region]) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(3, 4)
    call, reports = compiled(model, "aot_eager")
    with torch.no_grad():
        assert torch.equal(call(x), model(x))
        result = relu2ir.fuse(torch.export.export(model, (x,)))
        assert torch.equal(result.module.module()(x), model(x))
    for report in (*reports, result):
        assert len(report.sites) <= 1, "the square reads what the relu read before the write"


class ProductInCheckpoint(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return checkpoint(self.product, x, use_reentrant=False)


class ProductInCond(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.cond(x.sum() > 0, self.product, lambda x: self.up(x) + 1, (x,))


class ProductInBothModes(Region):
    """One body that is run without autocast first, and with it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = multiplied(x)
        with torch.autocast("cpu", torch.bfloat16):
            return h + multiplied(x + 1)


@torch.compiler.nested_compile_region
def multiplied(x: torch.Tensor) -> torch.Tensor:
    r = F.relu(x)
    return r * r


@pytest.mark.parametrize("kind", [ProductInCheckpoint, ProductInCond, ProductInBothModes], ids=lambda k: k.__name__)
def test_a_product_in_a_body_that_runs_under_autocast_is_left_alone(kind: type[Region]) -> None:
    """On CUDA a product stays bfloat16 there and a square is float32."""
    call, reports = compiled(kind(), "aot_eager")
    with torch.no_grad():
        call(torch.randn(3, 4))
    assert [found(report) for report in reports] == [([], ["dtype_change"])]


def test_a_body_that_two_regions_share_is_fused_once() -> None:
    body = fx.symbolic_trace(lambda x: (torch.square(torch.relu(x)),))
    root, graph = nn.Module(), fx.Graph()
    root.one = root.other = body
    x = graph.placeholder("x")
    with_x = [graph.call_function(torch.gt, (graph.call_method("sum", (x,)), number)) for number in (0, 1)]
    branches = [graph.get_attr(name) for name in ("one", "other")]
    first = graph.call_function(torch.ops.higher_order.cond, (with_x[0], *branches, (x,)))
    second = graph.call_function(torch.ops.higher_order.cond, (with_x[1], *branches[::-1], (x,)))
    graph.output((first, second))
    result = relu2ir.fuse(fx.GraphModule(root, graph))
    assert found(result) == ([OP], [])
    assert result.module.one is result.module.other is not body
    assert ops_of(result.module) == ["relu2ir::relu_squared"] and not ops_of(fx.GraphModule(root, graph))
    given = torch.tensor([-1.0, 2.0])
    assert [each.tolist() for (each,) in result.module(given)] == [[0.0, 4.0]] * 2


@pytest.fixture
def kernels_first(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU's row as that of a GPU is: a kernel before plain PyTorch."""
    with monkeypatch.context() as patch:
        patch.setitem(registry.ROWS, "cpu", ("cpp", "native"))
        forget()
        yield
    forget()


@pytest.mark.needs("cpp")
@pytest.mark.usefixtures("kernels_first")
@pytest.mark.parametrize("kind", [Vmap, Jvp, Checkpoint, ReentrantCheckpoint], ids=lambda kind: kind.__name__)
def test_where_only_pytorch_can_run_a_preferred_kernel_leaves_it_to_pytorch(kind: type[Region]) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(3, 4)
    call, reports = compiled(model, "eager")
    assert_same(step(call, model, x), step(model, model, x))
    assert [site.provider for report in reports for site in report.sites] == ["cpp"]


def hardswish(x: torch.Tensor) -> torch.Tensor:
    """At -3 and 3 the gradient of relu6 is 0, that of the op's clamp is 1."""
    return x * F.relu6(x + 3) / 6


class BoundsByJvp(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(hardswish, (x.detach(),), (x.detach() + 1,))[1] + x


class BoundsByJacfwd(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.jacfwd(lambda y: hardswish(y).sum(0))(x.detach()) + x


class BoundsByJacrev(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.jacrev(lambda y: hardswish(y).sum(0))(x.detach()) + x


class BoundsByGrad(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda y: hardswish(y).sum())(x.detach()) + x


class BoundsInACarry(Region):
    """The first carry needs no gradient, the next ones do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scan(lambda carry, row: (carry * 0 + row, hardswish(carry)), torch.zeros(4), x)[1]


class BoundsInACheckpoint(Region):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(hardswish, x, use_reentrant=False)


@pytest.mark.parametrize(
    "kind",
    [BoundsByJvp, BoundsByJacfwd, BoundsByJacrev, BoundsByGrad, BoundsInACarry, BoundsInACheckpoint],
    ids=lambda kind: kind.__name__,
)
def test_a_spelling_of_another_gradient_is_left_alone_wherever_one_may_flow(kind: type[Region]) -> None:
    x = torch.tensor([3.0, -3.0, 1.0, 4.0]).expand(3, 4)
    model = kind()
    call, reports = compiled(model, "eager")
    assert_same(step(call, model, x), step(model, model, x))
    assert [report.sites for report in reports] == [()]


def test_example_inputs_are_known_in_graph_modules_below() -> None:
    root, graph = nn.Module(), fx.Graph()
    root.inner = fx.symbolic_trace(Squared())
    graph.output(graph.call_module("inner", (graph.placeholder("x"),)))
    fused, x = relu2ir.fuse(fx.GraphModule(root, graph)).module, torch.randn(3, 4)
    lowered = relu2ir.lower(fused, x, providers="native")
    assert ops_of(fused) and not ops_of(lowered)
    assert torch.equal(lowered(x), torch.relu(x).square())


def test_example_inputs_are_known_in_branches_and_behind_keywords() -> None:
    root, graph = nn.Module(), fx.Graph()
    root.inner = fx.symbolic_trace(lambda x, scale=2.0, *, shift=0.0: torch.square(torch.relu(x)) * scale + shift)
    root.one = fx.symbolic_trace(lambda x: (torch.square(torch.relu(x)),))
    root.other = fx.symbolic_trace(lambda x: (x,))
    x = graph.placeholder("x")
    positive = graph.call_function(torch.gt, (graph.call_method("sum", (x,)), 0))
    branches = [graph.get_attr(name) for name in ("one", "other")]
    of_cond = graph.call_function(torch.ops.higher_order.cond, (positive, *branches, (x,)))
    graph.output((graph.call_module("inner", (x,), {"shift": 1.0}), of_cond))
    fused, given = relu2ir.fuse(fx.GraphModule(root, graph)).module, torch.tensor([-1.0, 3.0])
    lowered = relu2ir.lower(fused, given, providers="native")
    assert len(ops_of(fused)) == 2 and not ops_of(lowered)
    inner, (of_cond,) = lowered(given)
    assert (inner.tolist(), of_cond.tolist()) == ([1.0, 19.0], [0.0, 9.0])
    assert "forward" not in vars(lowered.inner)
