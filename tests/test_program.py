"""Exported programs: fused and lowered, they validate, save, load and run, with the library and without it."""

from __future__ import annotations

import copy
import io
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.export import Dim, ExportedProgram, export, load, save, unflatten
from torch.utils._pytree import tree_leaves

import relu2ir


class Model(nn.Module):
    """Two outputs that are ops, a buffer that is written, and a second input."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.calls.add_(1)
        h = self.up(x)
        return F.relu(h) ** 2, F.silu(gate) * h, h


def program() -> ExportedProgram:
    return export(Model(), inputs())


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(3, 4), torch.randn(3, 8)


def ops(exported: ExportedProgram) -> list[str]:
    targets = [node.target for node in exported.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return [target.name() for target in targets if target.namespace.startswith("relu2ir")]


def test_a_program_is_fused_validates_and_gives_the_same():
    original = program()
    text = str(original)
    result = relu2ir.fuse(original)
    assert [site.op for site in result.sites] == ["relu2ir::relu_squared", "relu2ir::silu_mul"]
    assert str(original) == text
    fused = result.module
    fused.validate()
    assert ops(fused) == ["relu2ir::relu_squared", "relu2ir::silu_mul"]
    assert [spec.arg.name for spec in fused.graph_signature.output_specs] == [
        node.name for node in fused.graph.output_node().args[0]
    ]
    module, expected = fused.module(), original.module()
    for _ in range(2):
        for one, other in zip(module(*inputs()), expected(*inputs()), strict=True):
            assert torch.equal(one, other)
    assert torch.equal(module.calls, expected.calls) and module.calls.item() == 4  # one buffer, shared


def test_a_fused_program_is_saved_and_loaded(tmp_path: Path):
    fused = relu2ir.fuse(program()).module
    save(fused, tmp_path / "fused.pt2")
    loaded = load(tmp_path / "fused.pt2")
    assert ops(loaded) == ops(fused)
    for one, other in zip(loaded.module()(*inputs()), program().module()(*inputs()), strict=True):
        torch.testing.assert_close(one, other) if one.shape != other.shape else None
        assert one.shape == other.shape


@pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")  # of torch's own run_decompositions
@pytest.mark.parametrize("how", ["native", "decomposed"])
def test_a_program_without_our_ops_runs_without_the_library(how: str, tmp_path: Path):
    fused = relu2ir.fuse(program()).module
    plain = relu2ir.lower(fused, providers="native") if how == "native" else fused.run_decompositions()
    plain.validate()
    assert ops(plain) == []
    save(plain, tmp_path / "plain.pt2")
    torch.save((inputs(), fused.module()(*inputs())), tmp_path / "values.pt")
    code = f"""
import sys, torch
sys.modules["relu2ir"] = None
given, expected = torch.load({str(tmp_path / "values.pt")!r})
found = torch.export.load({str(tmp_path / "plain.pt2")!r}).module()(*given)
assert all(torch.allclose(a, b) for a, b in zip(found, expected))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_lowering_to_native_is_the_inverse_of_fusing():
    def targets(exported: ExportedProgram) -> list[str]:
        return [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]

    original = export(nn.Sequential(nn.Linear(4, 8), Squared()), (torch.randn(3, 4),))
    lowered = relu2ir.lower(relu2ir.fuse(original).module, providers="native")
    assert targets(lowered) == targets(original)


class Squared(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.square(torch.relu(x))


def test_a_graph_gives_a_graph():
    graph = fx.symbolic_trace(lambda x: torch.square(torch.relu(x))).graph
    before = str(graph)
    fused = relu2ir.fuse(graph).module
    assert isinstance(fused, fx.Graph) and str(graph) == before
    assert [str(node.target) for node in fused.nodes if node.op == "call_function"] == ["relu2ir.relu_squared.default"]


def test_finding_changes_nothing_and_holds_no_model():
    model = nn.Sequential(nn.Linear(4, 8), Squared())
    found = relu2ir.find(model)
    assert found.module is None
    assert [(site.op, site.path) for site in found.sites] == [("relu2ir::relu_squared", "1")]
    assert type(model[1]) is Squared
    assert str(found) == str(relu2ir.fuse(model))


def test_a_report_is_data_too():
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * torch.relu(x) + torch.square(torch.relu(y))

    class Calls(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return function(x, y)

    batch = torch.export.Dim("batch")
    shapes = {"x": {0: batch}, "y": {0: batch}}
    exported = export(Calls(), (torch.randn(3, 4), torch.randn(3, 4)), dynamic_shapes=shapes)
    report = json.loads(relu2ir.find(exported).to_json())
    (site,), (miss,) = report["sites"], report["near_misses"]
    assert site["source"].startswith(str(Path(__file__)))
    assert {key: site[key] for key in site if key not in ("source", "shape", "why")} == {
        "op": "relu2ir::relu_squared", "path": "", "exact": True,
        "spelling": "aten.square.default(aten.relu.default(x))",
        "dtype": "float32", "device": "cpu", "provider": "native",
    }  # fmt: skip
    assert site["shape"][1] == 4 and isinstance(site["shape"][0], str)
    assert (miss["reason"], miss["op"]) == ("x_times_relu", "relu2ir::relu_squared")
    assert report["skipped"] == [] and report["notes"] == []


def squared(x: torch.Tensor) -> torch.Tensor:
    return torch.square(F.relu(x))


class ReturnedTwice(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = squared(x)
        return y, y


class ReturnedInATree(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, object]:
        return {"first": squared(x), "others": [squared(x) + 1, None, 3]}


class ReturnedBesideItsInput(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return squared(x).view(-1), x


class WrittenToABuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = squared(x + 1)
        self.last.copy_(y)
        return y


class WrittenToAnInput(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = squared(x + 1)
        x.copy_(y)
        return y + 1


class OfConstants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.constant = torch.full((4,), 2.0)
        self.register_buffer("scratch", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return squared(x * torch.tensor([1.0, 2.0, 3.0, 4.0]) * self.constant * self.scratch)


class OfOneLayerTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = self.again = nn.Linear(4, 4)

    def forward(self, relu_squared: torch.Tensor) -> torch.Tensor:
        return squared(self.again(squared(self.layer(relu_squared))))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(4, 4), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.layer(x)).square_()


KINDS = {
    ReturnedTwice: 1, ReturnedInATree: 2, ReturnedBesideItsInput: 1, WrittenToABuffer: 1, WrittenToAnInput: 1,
    OfConstants: 1, OfOneLayerTwice: 2, InPlace: 1,
}  # fmt: skip


def done(program: ExportedProgram, x: torch.Tensor) -> list[object]:
    """What a copy of ``program`` returns, writes to its input and leaves in its buffers."""
    module, given = copy.deepcopy(program).module(), x.clone()
    return [*tree_leaves(module(given)), given, *module.state_dict().values()]


def assert_same(found: list[object], expected: list[object]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def reloaded(program: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    save(program, file)
    file.seek(0)
    return load(file)


@pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")  # of torch's own run_decompositions
@pytest.mark.parametrize("decomposed", [False, True], ids=["", "decomposed"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_form_of_a_fused_program_does_what_the_program_does(kind: type[nn.Module], decomposed: bool):
    x = torch.randn(3, 4)
    shapes = None if kind is WrittenToABuffer else ({0: Dim.DYNAMIC},)
    original = export(kind(), (x,), dynamic_shapes=shapes)
    original = original.run_decompositions() if decomposed else original
    result = relu2ir.fuse(original)
    assert ops(result.module) == ["relu2ir::relu_squared"] * KINDS[kind] and not result.near_misses
    lowered = relu2ir.lower(result.module, providers="native")
    assert len(relu2ir.find(lowered).sites) == len(result.sites) and not relu2ir.find(result.module).sites
    for given in (x, torch.randn(5, 4)) if shapes else (x,):
        expected = done(original, given)
        for program in (result.module, reloaded(result.module), lowered, result.module.run_decompositions()):
            program.validate()
            assert_same(done(program, given), expected)
    assert_same(tree_leaves(unflatten(copy.deepcopy(result.module))(x.clone())), tree_leaves(original.module()(x)))


def test_a_saved_program_needs_the_library_where_it_is_loaded(tmp_path: Path):
    fused = relu2ir.fuse(program()).module
    save(fused, tmp_path / "fused.pt2")
    torch.save((inputs(), fused.module()(*inputs())), tmp_path / "values.pt")
    code = f"""
import torch
given, expected = torch.load({str(tmp_path / "values.pt")!r})
found = torch.export.load({str(tmp_path / "fused.pt2")!r}).module()(*given)
assert all(map(torch.equal, found, expected))
"""
    root = str(Path(relu2ir.__file__).parents[1])
    results = [
        subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, cwd=root)
        for start in ("import relu2ir", "")
    ]
    assert results[0].returncode == 0, results[0].stderr
    assert results[1].returncode != 0 and "relu2ir.relu_squared" in results[1].stderr


@pytest.mark.parametrize("again", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_fused_graph_module_is_copied_and_pickled(again: Callable[[fx.GraphModule], fx.GraphModule]):
    fused = relu2ir.fuse(fx.symbolic_trace(nn.Sequential(nn.Linear(4, 8), Squared()))).module
    other, x = again(fused), torch.randn(3, 4)
    assert "torch.ops.relu2ir.relu_squared.default(" in other.code and not relu2ir.find(other).sites
    assert torch.equal(other(x), fused(x))
    with torch.no_grad():
        other.get_submodule("0").weight.mul_(2)
    assert not torch.equal(other(x), fused(x))


def test_a_fused_module_is_exported_saved_and_loaded():
    model, x = nn.Sequential(nn.Linear(4, 8), Squared(), nn.Linear(8, 4)), torch.randn(3, 4)
    fused = relu2ir.fuse(model).module
    exported = export(fused, (x,))
    assert ops(exported) == ["relu2ir::relu_squared"] and not relu2ir.find(exported).sites
    assert exported.state_dict.keys() == model.state_dict().keys()
    assert torch.equal(reloaded(exported).module()(x), model(x))
    lowered = relu2ir.lower(exported, providers="native")
    targets = [[node.target for node in p.graph.nodes] for p in (lowered, export(model, (x,)))]
    assert targets[0] == targets[1]


@pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore:Attempted to insert a get_attr:UserWarning"
)  # of unflatten
def test_a_program_that_keeps_its_modules_is_fused():
    model, x = nn.Sequential(nn.Linear(4, 8), Squared(), nn.Linear(8, 4), Squared()), torch.randn(3, 4)
    result = relu2ir.fuse(export(model, (x,), preserve_module_call_signature=("1", "2", "3")))
    assert ops(result.module) == ["relu2ir::relu_squared"] * 2
    for each in (result.module, reloaded(result.module), relu2ir.lower(result.module, providers="native")):
        modules = unflatten(each)
        assert torch.equal(modules(x), model(x))
        assert torch.equal(modules.get_submodule("1")(x), model[1](x))


@pytest.mark.xfail(strict=True, reason="the module call graph goes by the names of the nodes")
def test_the_result_of_a_module_that_a_program_keeps_is_not_absorbed():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.square(self.act(x))

    x = torch.randn(3, 4)
    result = relu2ir.fuse(export(Model(), (x,), preserve_module_call_signature=("act",)))
    assert [miss.reason for miss in result.near_misses] == ["escapes"]
    assert torch.equal(unflatten(result.module)(x), torch.relu(x).square())


@pytest.mark.needs("cpp")
def test_a_program_lowered_to_a_kernel_is_loaded_elsewhere(tmp_path: Path):
    model, x = nn.Sequential(nn.Linear(4, 8), Squared()), torch.randn(3, 4)
    lowered = relu2ir.lower(relu2ir.fuse(export(model, (x,))).module, providers="cpp")
    assert ops(lowered) == ["relu2ir_cpp::relu_squared"]
    save(lowered, tmp_path / "lowered.pt2")
    torch.save((x, lowered.module()(x)), tmp_path / "values.pt")
    code = f"""
import relu2ir, torch
x, expected = torch.load({str(tmp_path / "values.pt")!r})
assert torch.equal(torch.export.load({str(tmp_path / "lowered.pt2")!r}).module()(x), expected)
"""
    root = str(Path(relu2ir.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
