"""Raising ops in graphs: every spelling in every capture is found, every decoy is left alone with its reason."""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import relu2ir
from relu2ir import library, specfile
from relu2ir.fx.patterns import patterns
from relu2ir.fx.rewrite import find_ops, raise_ops
from relu2ir.fx.spellings import ROWS
from relu2ir.ir.primitives import PRIMITIVES
from relu2ir.oracle import torch_function

Function = Callable[[torch.Tensor], torch.Tensor]
OP = "relu2ir::relu_squared"


class Calls(nn.Module):
    """A module whose forward is ``function``."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def symbolic(function: Function, x: torch.Tensor) -> fx.GraphModule:
    return fx.symbolic_trace(function)


def dynamo(function: Function, x: torch.Tensor) -> fx.GraphModule:
    graphs: list[fx.GraphModule] = []

    def keep(graph_module: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(graph_module)
        return graph_module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=keep)(x)
    (graph_module,) = graphs
    return graph_module


def exported(function: Function, x: torch.Tensor) -> fx.GraphModule:
    return torch.export.export(Calls(function), (x,)).module()


CAPTURES = (symbolic, dynamo, exported)


def mul_by_keyword(x: torch.Tensor) -> torch.Tensor:
    r = torch.relu(input=x)
    return torch.mul(input=r, other=r)


def product(x: torch.Tensor) -> torch.Tensor:
    r = F.relu(x)
    return r * r


SPELLINGS: dict[str, Function] = {
    "torch.square(F.relu(x))": lambda x: torch.square(F.relu(x)),
    "torch.square(torch.relu(x))": lambda x: torch.square(torch.relu(x)),
    "F.relu(x).square()": lambda x: F.relu(x).square(),
    "x.relu().square()": lambda x: x.relu().square(),
    "torch.relu(x) ** 2": lambda x: torch.relu(x) ** 2,
    "F.relu(x) ** 2.0": lambda x: F.relu(x) ** 2.0,
    "torch.pow(F.relu(x), 2)": lambda x: torch.pow(F.relu(x), 2),
    "F.relu(x).pow(2)": lambda x: F.relu(x).pow(2),
    "torch.pow(relu, exponent=2)": lambda x: torch.pow(input=torch.relu(x), exponent=2),
    "x.relu().pow(exponent=2.0)": lambda x: x.relu().pow(exponent=2.0),
    "r * r": product,
    "torch.mul(r, r)": mul_by_keyword,
    "relu(x) * relu(x)": lambda x: F.relu(x) * torch.relu(x),
    "F.relu(x, inplace=False)": lambda x: F.relu(x, inplace=False).square(),
    "F.relu(x, False)": lambda x: F.relu(x, False).square(),
    "aten": lambda x: torch.ops.aten.square.default(torch.ops.aten.relu.default(x)),
}

# Without known types a float exponent is left alone.
SPELLED = [(c, name) for c in CAPTURES for name in SPELLINGS if c is not symbolic or "2.0" not in name]


def ops_of(graph_module: fx.GraphModule) -> list[str]:
    """The names of relu2ir's ops in the graph."""
    targets = [node.target for node in graph_module.graph.nodes if node.op == "call_function"]
    return [t.name() for t in targets if isinstance(t, torch._ops.OpOverload) and t.namespace == "relu2ir"]


def special(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, 3.3e38, -2.5, 1.7, 0.3]
    return torch.tensor(values, dtype=torch.float64).to(dtype).reshape(2, 5)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(bits), b.view(bits))


@pytest.mark.parametrize(("capture", "spelling"), SPELLED, ids=lambda v: getattr(v, "__name__", v))
def test_every_spelling_is_raised_in_every_capture_without_changing_a_bit(capture: Callable, spelling: str) -> None:
    captured = capture(SPELLINGS[spelling], special())
    before = captured.code
    result = relu2ir.fuse(captured)
    assert [site.op for site in result.sites] == [OP] == ops_of(result.module)
    assert not result.near_misses
    assert captured.code == before
    assert not {n.name for n in result.module.graph.nodes} & {"relu", "square", "pow_1", "mul", "relu_1"}
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        x = special(dtype)
        outputs = captured(x), result.module(x)
        old, new = (out[0] if isinstance(out, tuple) else out for out in outputs)
        assert same_bits(old, new)


@pytest.mark.parametrize("capture", [symbolic, exported], ids=lambda c: c.__name__)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_fused_gradients_are_those_of_the_spelling(capture: Callable, spelling: str) -> None:
    captured = capture(SPELLINGS[spelling], torch.randn(4, 6))
    x = torch.randn(4, 6)
    gradients = []
    for module in (captured, relu2ir.fuse(captured).module):
        leaf = x.clone().requires_grad_()
        module(leaf).backward(torch.arange(24.0).reshape(4, 6))
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


def packed_chunk(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def packed_commuted(x: torch.Tensor) -> torch.Tensor:
    gate, up = torch.chunk(x, 2, dim=-1)
    return up * F.silu(gate)


def packed_keywords(x: torch.Tensor) -> torch.Tensor:
    halves = torch.chunk(input=x, chunks=2, dim=-1)
    return torch.mul(F.silu(input=halves[0]), halves[1])


def packed_split(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.split([4, 4], dim=-1)
    return F.silu(gate) * up


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("function", [packed_chunk, packed_commuted, packed_keywords, packed_split])
def test_packed_halves_are_raised_to_one_op_of_the_packed_tensor(capture: Callable, function: Function) -> None:
    x = torch.randn(3, 8)
    result = relu2ir.fuse(capture(function, x))
    assert ops_of(result.module) == ["relu2ir::silu_and_mul"]
    assert not [n for n in result.module.graph.nodes if "chunk" in n.name or "split" in n.name or "getitem" in n.name]
    out = result.module(x)
    assert torch.equal(out[0] if isinstance(out, tuple) else out, function(x))


def swapped_halves(x: torch.Tensor) -> torch.Tensor:
    up, gate = x.chunk(2, -1)
    return F.silu(gate) * up


def rows(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, 0)
    return F.silu(gate) * up


def thirds(x: torch.Tensor) -> torch.Tensor:
    gate, up, _ = x.chunk(3, -1)
    return F.silu(gate) * up


@pytest.mark.parametrize(
    ("function", "op"), [(swapped_halves, "mul_and_silu"), (rows, "silu_mul"), (thirds, "silu_mul")]
)
def test_other_halves_are_another_op(function: Function, op: str) -> None:
    x = torch.randn(4, 6)
    result = relu2ir.fuse(dynamo(function, x))
    assert ops_of(result.module) == [f"relu2ir::{op}"]
    assert torch.equal(result.module(x)[0], function(x))


def escaping(x: torch.Tensor) -> torch.Tensor:
    r = F.relu(x)
    return r.square() + r


def returned(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    r = F.relu(x)
    return r, r.square()


def written_after_the_read(x: torch.Tensor) -> torch.Tensor:
    r = F.relu(x)
    x.add_(1)
    return r.square()


def written_through_a_view(x: torch.Tensor) -> torch.Tensor:
    r = F.relu(x)
    x.view(-1)[1:].mul_(3)
    return r.square()


def written_by_assignment(x: torch.Tensor) -> torch.Tensor:
    r = F.relu(x)
    x[0] = 7.0
    return r.square()


def intermediate_written(x: torch.Tensor) -> torch.Tensor:
    r = F.relu(x)
    r.add_(1)
    return r.square()


def relu_in_place(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x, inplace=True).square() + x


def relu_of_a_view_in_place(x: torch.Tensor) -> torch.Tensor:
    h = x + 1
    return F.relu(h[:1], inplace=True).square() + h


def square_under_a_view(x: torch.Tensor) -> torch.Tensor:
    r = F.relu(x)
    shown = r[:1]
    return r.square_() + shown


def tensor_exponent(x: torch.Tensor) -> torch.Tensor:
    return torch.pow(F.relu(x), torch.full_like(x, 2.0))


WRITTEN_OUT = (symbolic, dynamo)  # torch.export writes these in a form that is no lookalike any more
DECOYS: dict[str, tuple[Function, str, tuple[Callable, ...]]] = {
    "escapes": (escaping, "escapes", CAPTURES),
    "is returned": (returned, "escapes", CAPTURES),
    "add_ after the read": (written_after_the_read, "mutated", CAPTURES),
    "a view written after the read": (written_through_a_view, "mutated", CAPTURES),
    "setitem after the read": (written_by_assignment, "mutated", (dynamo, exported)),  # a proxy takes no item
    "r.add_": (intermediate_written, "escapes", WRITTEN_OUT),
    "inplace relu": (relu_in_place, "inplace", WRITTEN_OUT),
    "inplace relu of a view": (relu_of_a_view_in_place, "inplace", WRITTEN_OUT),
    "inplace relu of an input": (lambda x: F.relu(x, inplace=True).square(), "inplace", CAPTURES),
    "square_ of what a view shows": (square_under_a_view, "escapes", CAPTURES),
    "x * relu(x)": (lambda x: x * F.relu(x), "x_times_relu", CAPTURES),
    "relu(x) * x": (lambda x: F.relu(x) * x, "x_times_relu", CAPTURES),
    "where(x > 0, x * x, 0)": (lambda x: torch.where(x > 0, x * x, 0), "where_form", WRITTEN_OUT),
    "where(gt, square, 0.)": (lambda x: torch.where(torch.gt(x, 0), x.square(), 0.0), "where_form", WRITTEN_OUT),
    "tensor exponent": (tensor_exponent, "tensor_exponent", CAPTURES),
}


@pytest.mark.parametrize(
    ("decoy", "capture"),
    [(decoy, capture) for decoy, (_, _, captures) in DECOYS.items() for capture in captures],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_decoys_are_left_alone_and_named(decoy: str, capture: Callable) -> None:
    function, reason, _ = DECOYS[decoy]
    captured = capture(function, torch.randn(2, 5))
    result = relu2ir.fuse(captured)
    assert not result.sites
    assert result.module.code == captured.code
    assert [miss.reason for miss in result.near_misses] == [reason]
    assert result.near_misses[0].detail


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.relu(x) ** 3,
        lambda x: torch.square(F.leaky_relu(x)),
        lambda x: F.relu(x.square()),
        lambda x: F.relu(x) + F.relu(-x),
        lambda x: torch.relu(x),
        lambda x: torch.add(F.relu(x), F.relu(x), alpha=2),
    ],
)
def test_what_is_no_op_is_no_near_miss_either(function: Function) -> None:
    captured = dynamo(function, torch.randn(2, 5))
    result = relu2ir.fuse(captured)
    assert not result.sites
    assert not result.near_misses
    assert result.module.code == captured.code


IN_PLACE: dict[str, Function] = {
    "F.relu(x).square_()": lambda x: F.relu(x + 1).square_(),
    "F.relu(x, inplace=True).square()": lambda x: F.relu(x + 1, inplace=True).square(),
    "(x + 1).relu_() ** 2": lambda x: (x + 1).relu_() ** 2,
    "relu_ and square_": lambda x: torch.square_(F.relu_(x + 1)),
    "of a view that nothing else shows": lambda x: F.relu((x + 1).view(-1), inplace=True).square(),
}


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda capture: capture.__name__)
@pytest.mark.parametrize("name", IN_PLACE)
def test_a_write_that_nothing_else_sees_is_no_obstacle(name: str, capture: Callable) -> None:
    x = torch.randn(2, 5)
    result = relu2ir.fuse(capture(IN_PLACE[name], x))
    assert [site.op for site in result.sites] == [OP]
    assert "_(" not in result.module.code.replace("wrapped_", "").replace("_guards_fn(", "")
    found = result.module(x)
    assert torch.equal(found if isinstance(found, torch.Tensor) else found[0], IN_PLACE[name](x))


def test_a_write_before_the_read_is_seen_by_the_op() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y.add_(1)
        return F.relu(y).square()

    fused = relu2ir.fuse(fx.symbolic_trace(function))
    x = torch.randn(3, 4)
    assert len(fused.sites) == 1
    assert torch.equal(fused.module(x), torch.relu(x + 1).square())


def test_a_write_to_other_memory_does_not_matter() -> None:
    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, weight)
        r = F.relu(h)
        x.add_(1)
        return r.square() + x.sum()

    fused = relu2ir.fuse(fx.symbolic_trace(function))
    weight = torch.randn(4, 4)
    assert len(fused.sites) == 1
    x = torch.randn(3, 4)
    assert torch.equal(fused.module(x.clone(), weight), function(x.clone(), weight))


def test_the_op_reads_where_the_spelling_read() -> None:
    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        r = F.relu(F.linear(x, weight))
        noise = torch.tanh(x)
        return r.square() + noise

    names = [node.name for node in relu2ir.fuse(fx.symbolic_trace(function)).module.graph.nodes]
    assert names.index("relu_squared") < names.index("tanh")


def test_user_nodes_that_nothing_reads_stay() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        y = F.relu(x).square()
        y.square_()
        return y

    fused = relu2ir.fuse(fx.symbolic_trace(function))
    assert len(fused.sites) == 1
    assert "square_" in [node.name for node in fused.module.graph.nodes]
    x = torch.randn(3)
    assert torch.equal(fused.module(x), torch.relu(x).square().square())


def test_fusing_twice_finds_nothing_more() -> None:
    once = relu2ir.fuse(fx.symbolic_trace(product)).module
    twice = relu2ir.fuse(once)
    assert not twice.sites
    assert twice.module.code == once.code


def test_meta_of_the_replaced_root_is_kept() -> None:
    captured = dynamo(product, torch.randn(2, 3))
    (root,) = [n for n in captured.graph.nodes if n.target is operator.mul]
    (op,) = [n for n in relu2ir.fuse(captured).module.graph.nodes if n.name.startswith("relu_squared")]
    assert op.meta["example_value"] is root.meta["example_value"]
    assert op.meta["stack_trace"] == root.meta["stack_trace"]


def test_sites_in_the_branches_of_a_cond_are_raised() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: F.relu(x).square(), lambda x: F.relu(-x) ** 2, (x,))

    captured = exported(function, torch.randn(2, 3))
    result = relu2ir.fuse(captured)
    assert len(result.sites) == 2
    for x in (torch.ones(2, 3), -torch.ones(2, 3)):
        assert torch.equal(result.module(x), function(x))
    assert not any("relu2ir" in m.code for m in captured.modules() if isinstance(m, fx.GraphModule))


def test_a_product_under_autocast_keeps_its_type() -> None:
    class Region(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                r = F.relu(x)
                return r * r

    for captured in (dynamo(Region(), torch.randn(2, 3)), torch.export.export(Region(), (torch.randn(2, 3),)).module()):
        result = relu2ir.fuse(captured)
        assert not result.sites
        assert [miss.reason for miss in result.near_misses] == ["dtype_change"]


def test_a_result_of_another_type_is_not_the_op() -> None:
    captured = dynamo(lambda x: torch.square(F.relu(x)), torch.randn(2, 3))
    (root,) = [n for n in captured.graph.nodes if n.name == "square"]
    root.meta["example_value"] = root.meta["example_value"].double()  # as CUDA autocast gives for a half operand
    assert [miss.reason for miss in relu2ir.fuse(captured).near_misses] == ["dtype_change"]


def raised(function: Callable, text: str) -> list[tuple[str, str, dict[str, float], list[str]]]:
    """(op, spelling, params, tensors) of what is found in ``function`` for the ops of a spec file."""
    graph = fx.Tracer().trace(function)
    found, _ = find_ops(graph, nn.Module(), patterns(specfile.read_text(text).ops))
    return [(m.spec.name, m.spelling, dict(m.params), [t.name for t in m.tensors]) for m in found]


DOUBLE = "namespace: other\nops: {double_relu: {inputs: [x], expr: relu(x) + relu(x)}}"
STAR = """
namespace: other
ops: {star_relu: {inputs: [x, bias], params: {scale: 0.9}, expr: scale * square(relu(x)) + bias}}
"""
BOTH = """
namespace: other
ops:
  squared: {inputs: [x], expr: square(relu(x))}
  gated: {inputs: [x, y], expr: square(relu(x)) * y}
  alone: {inputs: [x], expr: relu(x)}
"""


def test_a_users_op_is_found_in_one_relu_or_two() -> None:
    def once(x: torch.Tensor) -> torch.Tensor:
        r = F.relu(x)
        return r + r

    assert raised(once, DOUBLE) == [("double_relu", "F.relu(x) + F.relu(x)", {}, ["x"])]
    assert raised(lambda x: x.relu() + F.relu(x), DOUBLE) == [("double_relu", "x.relu() + F.relu(x)", {}, ["x"])]
    assert raised(lambda x, y: y.relu() + F.relu(x), DOUBLE) == []


def test_a_literal_binds_to_a_param() -> None:
    function = lambda x, w, b: torch.add(F.linear(b, w), 1.5 * F.relu(F.linear(x, w)) ** 2)  # noqa: E731
    (found,) = raised(function, STAR)
    assert found[0] == "star_relu"
    assert found[2:] == ({"scale": 1.5}, ["linear_1", "linear"])
    assert raised(lambda x, w, b, s: F.linear(b, w) + s * F.relu(F.linear(x, w)) ** 2, STAR) == []


def test_an_operand_that_may_be_a_number_is_not_an_input() -> None:
    assert raised(lambda x, n: 1.5 * F.relu(x) ** 2 + n, STAR) == []


def test_the_longest_match_wins_and_a_single_primitive_is_not_raised() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = F.linear(x, w)
        return F.linear(h, w) * F.relu(h).square(), F.relu(h) ** 2, F.relu(h)

    found = raised(function, BOTH)
    assert [(name, tensors) for name, _, _, tensors in found] == [
        ("gated", ["linear", "linear_1"]),
        ("squared", ["linear"]),
    ]


def test_every_primitive_has_spellings() -> None:
    assert set(ROWS) == set(PRIMITIVES)
    for name, row in ROWS.items():
        assert len(row.parameters) == len(PRIMITIVES[name].args)
        meaning = PRIMITIVES[name].torch
        assert operator.attrgetter(meaning.removeprefix("torch."))(torch) in row.functions


@pytest.mark.parametrize("name", [name for name in ROWS if name != "where"])
def test_every_spelling_of_a_primitive_computes_it(name: str) -> None:
    row, meaning = ROWS[name], torch_function(name)
    x, y, z = torch.tensor([0.5, 2.0, 3.0]), torch.tensor([2.0, 2.0, 0.25]), torch.tensor([2.5, 3.0, 0.5])
    tensors, numbers = [x, y, z][: len(row.parameters)], [x, 0.75, 2.5][: len(row.parameters)]
    settings = {key: value for key, (default, value) in row.settings.items() if value != default}
    for function in row.functions:
        bounds = name.startswith("clamp") and str(function).endswith(".default")
        given = numbers if bounds or "Scalar" in str(function) else tensors
        assert torch.equal(function(*given, **settings), meaning(*given)), function
    for method in row.methods:
        assert torch.equal(getattr(x, method)(*tensors[1:]), meaning(*tensors)), method
    for module in row.modules:
        assert torch.equal(module(**settings)(*tensors), meaning(*tensors)), module
    for function in row.inplace:
        given = numbers if "Scalar" in str(function) or "default" in str(function) else tensors
        written = x.clone()
        assert torch.equal(function(written, *given[1:]), meaning(*given)), function
        assert torch.equal(written, meaning(*given)), function


def chain(length: int) -> fx.GraphModule:
    graph = fx.Graph()
    node = graph.placeholder("x")
    for _ in range(length):
        node = graph.call_function(torch.square, (graph.call_function(F.relu, (node,)),))
    graph.output(node)
    return fx.GraphModule(nn.Module(), graph)


def test_the_pass_is_linear() -> None:
    calls = []
    for length in (100, 400):
        captured, events = chain(length), []
        before = sys.getprofile()
        sys.setprofile(lambda frame, event, arg, events=events: events.append(event))
        try:
            found, _ = raise_ops(captured.graph, captured, patterns(library.specs()))
        finally:
            sys.setprofile(before)
        assert len(found) == length
        calls.append(events.count("call"))
    assert calls[1] < 4.4 * calls[0]


def test_the_report_is_a_table_with_the_provider_and_why() -> None:
    text = str(relu2ir.fuse(dynamo(lambda x: F.relu(x) ** 2 + x * F.relu(x), torch.randn(2, 3))))
    assert text.splitlines()[0] == "1 fused, 1 near misses"
    (row,) = [line for line in text.splitlines() if "F.relu(x) ** 2" in line]
    assert re.search(
        r"\(top\) +relu2ir::relu_squared +F\.relu\(x\) \*\* 2 +float32 \[2, 3\] +native +.*test_fuse\.py:\d+", row
    )
    assert "relu2ir::relu_squared -> native: the row of platform 'cpu'" in text
    assert "x_times_relu: x * relu(x) is NaN at -inf" in text
    with relu2ir.use(platform="cuda"):
        assert "the row of platform 'cuda'" in str(relu2ir.fuse(dynamo(product, torch.randn(2, 3))))


def opaque_relu_squared(x: torch.Tensor) -> torch.Tensor:
    return torch.square(F.relu(x))


def test_what_is_called_as_a_whole_and_what_is_fused_already_are_told() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(
        (graph.call_function(opaque_relu_squared, (x,)), graph.call_function(torch.square, (relu_of(graph, x),)))
    )
    once = relu2ir.fuse(fx.GraphModule(nn.Module(), graph))
    assert [(miss.reason, miss.spelling) for miss in once.near_misses] == [("opaque", "opaque_relu_squared()")]
    assert len(once.sites) == 1 and once.already_fused == ()
    twice = relu2ir.fuse(once.module)
    assert twice.sites == () and twice.already_fused == ("relu_squared",)
    assert "already fused: relu_squared" in str(twice)
    model = nn.Sequential(Calls(opaque_relu_squared), relu2ir.nn.ReLUSquared())
    assert relu2ir.fuse(model).already_fused == ("1",)


def relu_of(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return graph.call_function(F.relu, (x,))


def test_what_cannot_be_fused_is_refused_with_the_way_out() -> None:
    with pytest.raises(
        relu2ir.FuseError,
        match=r"fuse takes an nn\.Module, a torch\.fx\.GraphModule or Graph, or an ExportedProgram; found func",
    ):
        relu2ir.fuse(product)
    with pytest.raises(relu2ir.FuseError, match=r"Fuse the model before torch\.compile"):
        relu2ir.fuse(torch.compile(nn.Linear(2, 2)))


def test_an_intermediate_result_is_no_input_of_the_op_that_computes_it():
    """With an own op ``relu(a) * b`` loaded, ``r * r`` stays a square of a relu."""
    (scaled,) = specfile.read_text("namespace: own\nops:\n  scaled: {inputs: [a, b], expr: relu(a) * b}\n").ops

    def squared(x: torch.Tensor) -> torch.Tensor:
        r = torch.relu(x)
        return r * r

    graph = fx.symbolic_trace(squared)
    both = relu2ir.fuse(graph, specs=[scaled, *library.specs()])
    assert [site.op for site in both.sites] == ["relu2ir::relu_squared"]
    alone = relu2ir.fuse(graph, specs=[scaled])
    assert [near.reason for near in alone.near_misses] == ["escapes"]
    assert not alone.sites
