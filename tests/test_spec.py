"""The op spec as a value: schema, formula, definition hash, exactness, and the gradient op that follows from it."""

import copy
import pickle

import pytest

from relu2ir.ir.expr import Call
from relu2ir.ir.parse import parse
from relu2ir.spec import Input, Layout, OpSpec, Output
from relu2ir.specfile import read_text


def op(stanza: str) -> OpSpec:
    """The op of ``{inputs: [x], expr: ...}``, called f."""
    return read_text("namespace: mine\nops:\n  f: {" + stanza + "}").ops[0]


RELU_SQUARED = "inputs: [x], expr: square(relu(x))"
SWIGLU = "inputs: {x: {halves: [gate, up]}}, expr: silu(gate) * up"
CLIPPED = "inputs: [x, y], params: {limit: 7, scale: 0.5}, expr: 'where(x <= limit, x * y, scale)'"


def test_the_schema_lists_tensors_then_params_by_keyword():
    assert op(RELU_SQUARED).schema == "f(Tensor x) -> Tensor"
    assert op(SWIGLU).schema == "f(Tensor x) -> Tensor"
    assert op(CLIPPED).schema == "f(Tensor x, Tensor y, *, float limit=7.0, float scale=0.5) -> Tensor"
    assert op(CLIPPED).qualname == "mine::f"


def test_the_schema_is_one_that_torch_reads():
    import torch

    for spec in (op(stanza) for stanza in (RELU_SQUARED, SWIGLU, CLIPPED)):
        for each in spec.with_gradients:
            assert torch._C.parse_schema(f"mine::{each.schema}").name == f"mine::{each.name}"


def test_the_formula_is_over_scalars():
    assert op(SWIGLU).formula == "f(gate, up) = silu(gate) * up"
    assert op(CLIPPED).formula == "f(x, y, limit, scale) = where(x <= limit, x * y, scale)"
    assert op(RELU_SQUARED).backward.formula == "f_backward(grad, x) = where(x <= 0, 0, grad * (2 * relu(x)))"


def test_the_gradient_op_takes_the_gradient_first_and_mirrors_the_inputs():
    backward = op(SWIGLU).backward
    assert backward.schema == "f_backward(Tensor grad, Tensor x) -> Tensor"
    assert backward.parts == ("grad", "gate", "up")
    assert [(output.name, output.layout) for output in backward.outputs] == [("x", Layout.halves)]
    assert [str(expr) for expr in backward.exprs][1] == "grad * silu(gate)"
    assert op(CLIPPED).backward.returns == "(Tensor, Tensor)"
    assert op(CLIPPED).backward.params == {"limit": 7.0, "scale": 0.5}


def test_the_definition_is_what_the_op_computes_and_nothing_else():
    assert op(RELU_SQUARED).definition == "(x) -> square(relu(x))"
    assert op(SWIGLU).definition == "(x: halves[gate, up]) -> silu(gate) * up"
    assert op(CLIPPED).definition == "(x, y; limit=7, scale=0.5) -> where(x <= limit, x * y, scale)"
    assert op(RELU_SQUARED).backward.definition == "gradient of (x) -> square(relu(x))"


def test_the_hash_follows_the_definition():
    same = [RELU_SQUARED, "inputs: [x], expr: 'square( relu((x)) )', doc: other words, source: elsewhere"]
    other = ["inputs: [y], expr: square(relu(y))", "inputs: [x], expr: relu(square(x))", SWIGLU, CLIPPED,
             CLIPPED.replace("7", "7.5"), SWIGLU.replace("halves", "pairs")]  # fmt: skip
    assert len({op(stanza).hash for stanza in same}) == 1
    assert len({op(stanza).hash for stanza in same + other}) == 1 + len(other)
    assert op(RELU_SQUARED).hash != op(RELU_SQUARED).backward.hash
    # Binaries and compile caches hold this text: a change of the algorithm refuses every built kernel.
    assert op(RELU_SQUARED).hash == "c79e1547925aafcc"


@pytest.mark.parametrize(
    ("expr", "exact"),
    [
        ("square(relu(x))", True),
        ("relu(x)", True),
        ("-x", True),
        ("where(x <= 0, 0, x) * relu(-x)", True),
        ("relu(square(x))", False),
        ("2 * square(relu(x))", False),
        ("silu(x) * x", False),
    ],
)
def test_an_op_is_exact_when_nothing_is_rounded_before_the_root(expr, exact):
    assert op(f"inputs: [x], expr: '{expr}'").exact is exact


def test_an_output_that_another_output_reads_makes_an_op_inexact():
    product = parse("x * x")
    outputs = (Output("a", Layout.plain, (product,)), Output("b", Layout.plain, (Call("relu", (product,)),)))
    spec = OpSpec("mine", "two", (Input("x", parts=("x",)),), outputs)
    assert not spec.exact
    assert OpSpec("mine", "one", spec.inputs, outputs[:1]).exact


def test_a_spec_is_a_frozen_value_that_can_be_hashed_copied_and_sent():
    spec = op(CLIPPED)
    with pytest.raises(AttributeError):
        spec.name = "g"
    with pytest.raises(TypeError):
        spec.params["limit"] = 8.0
    assert spec == op(CLIPPED) and hash(spec) == hash(op(CLIPPED))
    assert copy.deepcopy(spec) == spec
    assert pickle.loads(pickle.dumps(spec.backward)) == spec.backward
