"""What fusing leaves as it was: the copy's references to itself, the rest of every graph, each node's meta."""

from __future__ import annotations

import inspect
import operator
import re
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_fuse import Calls, dynamo, symbolic
from torch import fx, nn

import relu2ir
from relu2ir import library
from relu2ir.fx.patterns import patterns
from relu2ir.fx.rewrite import raise_ops


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


def exported(function: Callable[..., Any], x: torch.Tensor) -> fx.GraphModule:
    return torch.export.export(Calls(function), (x,)).graph_module


def decomposed(function: Callable[..., Any], x: torch.Tensor) -> fx.GraphModule:
    return torch.export.export(Calls(function), (x,)).run_decompositions().graph_module


CAPTURES = (symbolic, dynamo, exported, decomposed)
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")  # of torch's own run_decompositions


def everything(x: torch.Tensor) -> torch.Tensor:
    """Three ops a round between views, writes, a product that is no op, and a result that nobody reads."""
    for _ in range(3):
        h = torch.layer_norm(x, (8,))
        r = F.relu(h)
        noise = torch.tanh(x)
        noise.view(-1).mul_(0.5)
        h = torch.square(r) + noise
        unread = h.clone()
        unread.square_()
        gate, up = h.chunk(2, -1)
        g = F.silu(gate)
        other = torch.sigmoid(gate) * up
        both = torch.cat([g * up, other], -1)
        r = F.relu(both)
        scaled = both.transpose(0, 1).mul(2.0).transpose(0, 1)
        x = x + r * r + scaled * torch.relu(scaled)
    return x


def is_op(node: fx.Node) -> bool:
    return str(node.target).startswith("relu2ir.")


def text(node: fx.Node) -> str:
    """The name of a node, what it calls and on what."""
    return re.sub(r"\[num_users=\d+\] ", "", str(node.format_node()))


def compared(before: fx.Graph, after: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Each op of ``after`` by the node of ``before`` that it replaced, told by who reads it; all else must be equal."""
    stayed = {node.name: node for node in after.nodes if not is_op(node)}
    replaced: dict[fx.Node, fx.Node] = {}
    kept = [node for node in before.nodes if node.name in stayed]
    for old, new in zip(kept, stayed.values(), strict=True):
        expected = text(old)
        for was, now in zip(old.all_input_nodes, new.all_input_nodes, strict=True):
            if was.name != now.name:
                assert replaced.setdefault(was, now) is now and is_op(now)
                expected = re.sub(rf"%{was.name}\b", f"%{now.name}", expected)
        assert text(new) == expected
        assert new.meta.keys() == old.meta.keys() and all(new.meta[key] is old.meta[key] for key in old.meta)
    assert list(replaced.values()) == [node for node in after.nodes if is_op(node)]
    return replaced


@pytest.mark.parametrize("capture", CAPTURES)
def test_the_rest_of_a_graph_stays_as_it_is(capture: Callable[..., fx.GraphModule]) -> None:
    captured = capture(everything, torch.randn(4, 8))
    before = str(captured.graph)
    result = relu2ir.fuse(captured)
    assert str(captured.graph) == before
    ops = ["relu_squared", "silu_and_mul", "relu_squared"]
    assert [site.spec.name for site in result.sites] == ops * 3
    after = result.module.graph
    after.lint()
    assert len(compared(captured.graph, after)) == len(result.sites)
    gone = len(captured.graph.nodes) - len(after.nodes)
    decomposed_silu = 3 if capture is decomposed else 0  # it is a sigmoid and a product there
    assert gone == len(result.sites) + decomposed_silu, "two nodes became one"


@pytest.mark.parametrize("capture", CAPTURES)
def test_an_op_stands_where_its_last_input_was_read_and_keeps_the_meta_of_its_root(
    capture: Callable[..., fx.GraphModule],
) -> None:
    captured = capture(everything, torch.randn(4, 8))
    result = relu2ir.fuse(captured)
    nodes, raised = list(captured.graph.nodes), list(result.module.graph.nodes)
    stayed = {node.name for node in raised}
    for root, op in compared(captured.graph, result.module.graph).items():
        reader = next((node for node in root.all_input_nodes if "relu" in str(node.target)), root)
        following = next(node for node in nodes[nodes.index(reader) + 1 :] if node.name in stayed)
        behind = next(node for node in raised[raised.index(op) + 1 :] if not is_op(node))
        assert behind.name == following.name
        assert op.meta.keys() == root.meta.keys() and op.stack_trace == root.stack_trace
        assert all(op.meta[key] is root.meta[key] for key in root.meta)
        assert capture is symbolic or ("example_value" if capture is dynamo else "val") in op.meta


@pytest.mark.parametrize("capture", CAPTURES)
def test_fusing_and_lowering_again_change_nothing(capture: Callable[..., fx.GraphModule]) -> None:
    x = torch.randn(4, 8)
    captured = capture(everything, x)
    example = (x,) if capture is symbolic else ()
    once = relu2ir.fuse(captured)
    again = relu2ir.fuse(once.module)
    assert not again.sites and again.near_misses == once.near_misses
    assert str(again.module.graph) == str(once.module.graph)
    lowered = relu2ir.lower(once.module, *example, providers="native")
    raised = relu2ir.fuse(lowered)
    assert [site.spec for site in raised.sites] == [site.spec for site in once.sites]
    assert raised.module.code == once.module.code
    assert relu2ir.lower(raised.module, *example, providers="native").code == lowered.code


def work(build: Callable[[fx.Graph, fx.Node], fx.Node], rounds: int) -> int:
    """How many lines the pass runs to find and raise one site in each of ``rounds`` blocks of a graph."""
    graph, ran = fx.Graph(), 0
    value = graph.call_function(torch.add, (graph.placeholder("x"), 1))
    for _ in range(rounds):
        value = build(graph, value)
    graph.output(value)

    def count(frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        nonlocal ran
        ran += event == "line"
        return count if "relu2ir" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(count)
    try:
        found, near = raise_ops(graph, nn.Module(), patterns(library.specs()))
    finally:
        sys.settrace(before)
    assert len(found) == rounds and not near
    return ran


def one_after_another(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return graph.call_function(torch.square, (graph.call_function(F.relu, (graph.call_function(torch.add, (x, 1)),)),))


def in_place(graph: fx.Graph, x: fx.Node) -> fx.Node:
    fresh = graph.call_function(torch.add, (x, 1))
    return graph.call_function(torch.square, (graph.call_function(F.relu, (fresh, True)),))


def beside_writes(graph: fx.Graph, x: fx.Node) -> fx.Node:
    fresh = graph.call_function(torch.add, (x, 1))
    graph.call_method("add_", (fresh, 1))
    return one_after_another(graph, fresh)


def in_a_mode(graph: fx.Graph, x: fx.Node) -> fx.Node:
    graph.call_function(torch._C._set_grad_enabled, (False,))
    x = one_after_another(graph, x)
    graph.call_function(torch._C._set_grad_enabled, (True,))
    return x


def packed(graph: fx.Graph, x: fx.Node) -> fx.Node:
    halves = graph.call_method("chunk", (graph.call_function(torch.cat, ([x, x], -1)), 2, -1))
    gate, up = (graph.call_function(operator.getitem, (halves, i)) for i in (0, 1))
    return graph.call_function(torch.mul, (graph.call_function(F.silu, (gate,)), up))


@pytest.mark.parametrize("build", [one_after_another, packed, in_place, beside_writes, in_a_mode])
def test_the_work_grows_with_the_sites(build: Callable[[fx.Graph, fx.Node], fx.Node]) -> None:
    assert work(build, 400) < 4.4 * work(build, 100)
