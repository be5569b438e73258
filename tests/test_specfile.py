"""Reading spec files: what a good one means, and what is said about a bad one, word for word."""

import re
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from relu2ir.errors import Error, SpecError
from relu2ir.ir.parse import parse
from relu2ir.ir.primitives import PRIMITIVES
from relu2ir.oracle import evaluate
from relu2ir.registry import provider
from relu2ir.spec import Input, Layout, OpSpec
from relu2ir.specfile import FILE_KEYS, MAX_SIZE, OP_KEYS, SpecFile, read, read_text

OPS_YAML = Path(__file__).parents[1] / "ops.yaml"


def said(text: str) -> list[str]:
    """Everything that is said about ``text``, one line each, a problem with an excerpt taking three."""
    with pytest.raises(SpecError) as caught:
        read_text(text, "ops.yaml")
    return str(caught.value).splitlines()


def outcome(text: str) -> SpecFile | SpecError:
    try:
        return read_text(text)
    except SpecError as error:
        return error


def said_of(stanza: str) -> list[str]:
    return said("ops: {f: {" + stanza + "}}")


def ops_of(stanza: str) -> tuple[OpSpec, ...]:
    return read_text("ops: {f: {" + stanza + "}}").ops


def test_the_projects_own_file_declares_what_the_readme_says():
    file = read(OPS_YAML)
    assert file.namespace == "relu2ir"
    assert dict(file.platforms) == {
        "cuda": ("cuda", "triton", "native"), "rocm": ("cuda", "triton", "native"), "xpu": ("native",),
        "cpu": ("native",),
    }  # fmt: skip
    ops = {op.name: op for op in file.ops}
    assert ops["relu_squared"].expr is parse("square(relu(x))")
    assert ops["relu_squared"].inputs == (Input("x", Layout.plain, ("x",)),)
    assert ops["silu_and_mul"].inputs == (Input("x", Layout.halves, ("gate", "up")),)


def test_three_lines_declare_an_op():
    (op,) = read_text("ops:\n  double_relu:\n    {inputs: [x], expr: relu(x) + relu(x)}").ops
    assert op.qualname == "relu2ir::double_relu"
    assert op.formula == "double_relu(x) = relu(x) + relu(x)"


def test_every_key_of_an_op_is_read():
    stanza = """
namespace: mine
ops:
  gated:
    doc: A gate.
    source: nowhere
    inputs: {x: {pairs: [a, b]}, y: }
    params: {limit: 7.0, slope: 1e-3}
    expr: >
      where(a <= limit,
            a * slope, b) * y
    tolerance: {float16: 1e-3, bfloat16: 0.01}
"""
    (op,) = read_text(stanza).ops
    assert (op.qualname, op.doc, op.source) == ("mine::gated", "A gate.", "nowhere")
    assert op.inputs == (Input("x", Layout.pairs, ("a", "b")), Input("y", Layout.plain, ("y",)))
    assert op.params == {"limit": 7.0, "slope": 0.001}
    assert op.tolerance == {"float16": 0.001, "bfloat16": 0.01}
    assert op.expr is parse("where(a <= limit, a * slope, b) * y")


def test_a_bare_number_is_an_expression_that_leaves_its_inputs_unused():
    assert said_of("inputs: [x], expr: 3") == [
        "ops.yaml:1:20: 'x' is declared in op 'f' but its expr never uses it at $.ops.f.inputs.x"
    ]


def test_every_problem_of_a_file_is_told_at_once_in_file_order():
    text = """\
namespace: 9a
platforms: {cdua: [native], cuda: [cuda], xpu: [native, native], cpu: [], rocm: native}
ops:
  relu_squard: {inputs: [x], expr: square(rleu(x)), dco: hi}
  twice: {inputs: [x], expr: -x}
  twice: {inputs: [x], expr: -x}
  class: {inputs: [x], expr: -x}
  f_backward: {inputs: [x], expr: -x}
  seven:
    inputs: {x: {halves: [gate]}, y: {halvs: [a, b]}, z: {}}
    params: {limit: inf, v0: 1, 2x: 1}
    expr: gate
    tolerance: {float8: 1, float16: -1}
  eight: {doc: 8, inputs: [x, y, y, relu], expr: x * z}
  nine: {}
"""
    assert said(text) == """\
ops.yaml:1:12: '9a' cannot name a namespace: use lower-case letters, digits and '_', beginning with a letter and not ending in '_' at $.namespace
ops.yaml:2:13: unknown platform 'cdua'; did you mean 'cuda'? at $.platforms.cdua
ops.yaml:2:35: the row of 'cuda' must name each provider once and end with 'native' at $.platforms.cuda
ops.yaml:2:48: the row of 'xpu' must name each provider once and end with 'native' at $.platforms.xpu
ops.yaml:2:71: the row of 'cpu' must name each provider once and end with 'native' at $.platforms.cpu
ops.yaml:2:81: the row of 'rocm' must be a list of names, such as [x, y] at $.platforms.rocm
ops.yaml:4:43: cannot read expr of op 'relu_squard' at $.ops.relu_squard.expr
    square(rleu(x))
           ^^^^ unknown primitive 'rleu'; did you mean 'relu'?
ops.yaml:4:53: unknown key 'dco'; did you mean 'doc'? at $.ops.relu_squard.dco
ops.yaml:6:3: duplicate key 'twice', first on line 5 at $.ops.twice
ops.yaml:7:3: 'class' cannot name an op: it is a reserved word; choose another at $.ops.class
ops.yaml:8:3: 'f_backward' cannot name an op: derived gradient ops end in '_backward' or '_backward_from_output' at $.ops.f_backward
ops.yaml:10:26: 'halves' names two parts; found 1 at $.ops.seven.inputs.x.halves
ops.yaml:10:39: unknown key 'halvs'; did you mean 'halves'? at $.ops.seven.inputs.y.halvs
ops.yaml:10:58: input 'z' must have one layout: halves or pairs at $.ops.seven.inputs.z
ops.yaml:11:21: the default of param 'limit' must be a finite number at $.ops.seven.params.limit
ops.yaml:11:26: 'v0' cannot name a param: it is a reserved word; choose another at $.ops.seven.params.v0
ops.yaml:11:33: '2x' cannot name a param: use lower-case letters, digits and '_', beginning with a letter and not ending in '_' at $.ops.seven.params.2x
ops.yaml:13:17: unknown key 'float8'; did you mean 'float64'? at $.ops.seven.tolerance.float8
ops.yaml:13:37: the tolerance of float16 must not be negative at $.ops.seven.tolerance.float16
ops.yaml:14:16: doc must be text; put 8 in quotes at $.ops.eight.doc
ops.yaml:14:34: 'y' is declared twice, first on line 14 at $.ops.eight.inputs.y
ops.yaml:14:37: 'relu' cannot name an input: it is a reserved word; choose another at $.ops.eight.inputs.relu
ops.yaml:15:3: op 'nine' has no 'inputs' at $.ops.nine
ops.yaml:15:3: op 'nine' has no 'expr' at $.ops.nine""".splitlines()  # fmt: skip  # noqa: E501


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "ops.yaml: the file is empty; declare an op under 'ops' at $"),
        ("- 1", "ops.yaml:1:1: the file must be a mapping at $"),
        ("namespace: mine", "ops.yaml:1:1: the file declares nothing; add 'ops' at $"),
        ("opps: {}", "ops.yaml:1:1: unknown key 'opps'; did you mean 'ops'? at $.opps"),
        ("ops: [f]", "ops.yaml:1:6: 'ops' must be a mapping at $.ops"),
        ("ops: {? [a] : 1}", "ops.yaml:1:9: a key of 'ops' must be a name at $.ops"),
        ("namespace: aten\nops: {}", "ops.yaml:1:12: 'aten' cannot name a namespace: it is torch's own; choose another "
         "at $.namespace"),
        ("ops:\n\tf: 1", "ops.yaml:2:1: not YAML: found character '\\t' that cannot start any token at $"),
        ("ops: [", "ops.yaml:1:7: not YAML: expected the node content, but found '<stream end>' at $"),
        ("a: 1\n---\nb: 2", "ops.yaml:2:1: not YAML: but found another document at $"),
        ("ops: &a [*a]", "ops.yaml:1:6: 'ops' must be a mapping at $.ops"),
        ("[" * 3000, "ops.yaml: the file nests too deeply to be a spec; an op has three levels at $"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_spec_says_why(text, expected):
    assert said(text) == [expected]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("    expr: square(rleu(x))",
         ["ops.yaml:4:18: cannot read expr of op 'f' at $.ops.f.expr",
          "    square(rleu(x))",
          "           ^^^^ unknown primitive 'rleu'; did you mean 'relu'?"]),
        ('    expr: "square(rleu(x))"',
         ["ops.yaml:4:19: cannot read expr of op 'f' at $.ops.f.expr",
          "    square(rleu(x))",
          "           ^^^^ unknown primitive 'rleu'; did you mean 'relu'?"]),
        ("    expr: |\n      square(\n        rleu(x))\n",
         ["ops.yaml:4:11: cannot read expr of op 'f' at $.ops.f.expr",
          "    square(   rleu(x))",
          "              ^^^^ unknown primitive 'rleu'; did you mean 'relu'?"]),
        ("    expr: square(\n      rleu(x))",
         ["ops.yaml:4:11: cannot read expr of op 'f' at $.ops.f.expr",
          "    square( rleu(x))",
          "            ^^^^ unknown primitive 'rleu'; did you mean 'relu'?"]),
        # An escape makes the file longer than what it says: the caret is exact, the column is the value's.
        ('    expr: "\\x78 * y\\t+\\e z"',
         ["ops.yaml:4:11: cannot read expr of op 'f' at $.ops.f.expr",
          "    x * y +  z",
          "           ^ unexpected '\\x1b'; use numbers, names, calls, + - * / and one comparison inside where"]),
        ("    expr: xx + x * xy",
         ["ops.yaml:4:11: cannot read expr of op 'f' at $.ops.f.expr",
          "    xx + x * xy",
          "    ^^ unknown name 'xx'; did you mean 'x'?"]),
        ("    expr: [x]", ["ops.yaml:4:11: expr of op 'f' must be text, such as square(relu(x)) at $.ops.f.expr"]),
        ("    expr:", ["ops.yaml:4:10: expr of op 'f' must be text, such as square(relu(x)) at $.ops.f.expr"]),
        ("    expr: " + "+".join("x" * 120) + " + q",
         ["ops.yaml:4:11: cannot read expr of op 'f' at $.ops.f.expr",
          "    " + "+".join("x" * 120)[:200],
          "    " + "^" * 200 + " the expression nests deeper than 64 levels"]),
    ],
)  # fmt: skip
def test_a_problem_in_an_expression_has_its_place_and_a_caret(written, expected):
    assert said("ops:\n  f:\n    inputs: [x]\n" + written) == expected


BOUNDS = (
    "minimum and maximum are of two tensors, clamp is between two numbers, clamp_min(x, low) and clamp_max(x, high) "
    "take either"
)


@pytest.mark.parametrize(
    ("expr", "message"),
    [
        ("x * sqrt(2)", "'sqrt(2)' reads no input; write a number or a param in its place"),
        ("x * sigmoid(limit)", "'sigmoid(limit)' reads no input; write a number or a param in its place"),
        ("minimum(x, limit)", f"'limit' in 'minimum(x, limit)' reads no input; {BOUNDS}"),
        ("clamp_min(limit, x)", f"'limit' in 'clamp_min(limit, x)' reads no input; {BOUNDS}"),
        ("clamp(x, 0, limit * x)", f"'limit * x' in 'clamp(x, 0, limit * x)' reads an input; {BOUNDS}"),
        # torch.where of two Python numbers is float32 or int64, whatever x is.
        ("where(x < limit, 0, 1) * x",
         "the values of 'where(x < limit, 0, 1)' read no input; write a number or a param in its place"),
    ],
)  # fmt: skip
def test_a_call_must_read_an_input(expr, message):
    place, written, caret = said_of(f"inputs: [x], params: {{limit: 2}}, expr: '{expr}'")
    assert (place, written) == ("ops.yaml:1:51: cannot read expr of op 'f' at $.ops.f.expr", f"    {expr}")
    assert caret == f"    {'^' * len(expr)} {message}"


def test_arithmetic_may_be_on_numbers_and_params_alone():
    (op,) = read_text("ops: {f: {inputs: [x], params: {limit: 2}, expr: x * (1 / 6 - -limit) + 2 * limit}}").ops
    assert str(op.expr) == "x * (1 / 6 - -limit) + 2 * limit"


def test_an_op_computes_something():
    assert said_of("inputs: [x], expr: x") == [
        "ops.yaml:1:30: cannot read expr of op 'f' at $.ops.f.expr",
        "    x",
        "    ^ 'x' alone would return the input itself; an op computes a new tensor",
    ]


@pytest.mark.parametrize("written", ["٣", "1_0", "nan", "1e999", "[1]", "one"])
def test_a_default_is_a_finite_number_in_plain_digits(written):
    assert said_of(f"inputs: [x], params: {{limit: {written}}}, expr: x * limit") == [
        "ops.yaml:1:40: the default of param 'limit' must be a finite number at $.ops.f.params.limit"
    ]


@pytest.mark.parametrize("written", ["5e-324", "-2e-308"])
def test_a_default_that_torch_cannot_read_is_refused(written):
    assert said_of(f"inputs: [x], params: {{limit: {written}}}, expr: x * limit") == [
        "ops.yaml:1:40: the default of param 'limit' is subnormal; write 0 at $.ops.f.params.limit"
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ops: {name: {inputs: [x], expr: -x}}", "ops.yaml:1:7: 'name' cannot name an op"),
        ("ops: {f: {inputs: [provider], expr: -provider}}", "ops.yaml:1:20: 'provider' cannot name an input"),
        ("ops: {f: {inputs: [x], params: {provider: 1}, expr: x * provider}}",
         "ops.yaml:1:33: 'provider' cannot name a param"),
        ("namespace: higher_order\nops: {f: {inputs: [x], expr: -x}}",
         "ops.yaml:1:12: 'higher_order' cannot name a namespace"),
    ],
)  # fmt: skip
def test_a_name_that_calls_or_torch_use_themselves_is_reserved(text, expected):
    (problem,) = said(text)
    assert problem.startswith(f"{expected}: it is a reserved word; choose another")


def test_a_problem_far_to_the_right_is_counted_instead_of_drawn():
    assert said_of("inputs: [x], expr: " + "x " + " " * 250 + "+ q") == [
        "ops.yaml:1:284: cannot read expr of op 'f' at $.ops.f.expr",
        "    unknown name 'q'; valid: 'x' (character 255)",
    ]


def test_a_file_that_cannot_be_opened_or_is_not_text_is_a_spec_error(tmp_path):
    with pytest.raises(SpecError, match="cannot read the spec file: No such file or directory"):
        read(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="cannot read the spec file: it is not UTF-8 text"):
        read(tmp_path / "binary.yaml")


def test_problems_are_values_with_line_column_and_path():
    with pytest.raises(SpecError) as caught:
        read_text("ops:\n  f: {inputs: [x], exr: x}", "mine.yaml")
    assert [(p.file, p.line, p.column, p.path) for p in caught.value.problems] == [
        ("mine.yaml", 2, 3, "$.ops.f"), ("mine.yaml", 2, 20, "$.ops.f.exr"),
    ]  # fmt: skip
    assert issubclass(SpecError, Error)


@pytest.mark.parametrize(
    "text",
    [
        "ops: !!python/object/apply:os.mkdir [{path}]",
        "ops: {{f: !!python/object/apply:os.mkdir [{path}]}}",
        "ops: {{f: {{inputs: [x], expr: !!python/object/apply:os.mkdir [{path}]}}}}",
        'ops: {{f: {{inputs: [x], expr: \'__import__("os").mkdir("{path}")\'}}}}',
    ],
)
def test_nothing_in_a_spec_is_executed(text, tmp_path):
    made = tmp_path / "made"
    with pytest.raises(SpecError):
        read_text(text.format(path=made))
    assert not made.exists()


BROKEN = {
    "a tab": "ops:\n\tf: {}",
    "an open bracket": "ops: {f: {inputs: [x, expr: relu(x)}}",
    "an open quote": "ops: {f: {inputs: [x], expr: 'relu(x)}}",
    "an unknown alias": "ops: *f",
    "an alias of itself": "ops: &a {f: *a}",
    "a list in itself": "ops: {f: {inputs: &a [*a], expr: x}}",
    "many aliases": "ops: &a {f: &b [x, x], g: &c [*b, *b], h: &d [*c, *c], i: &e [*d, *d], j: [*e, *e]}",
    "a merge": "base: &b {inputs: [x]}\nops: {f: {<<: *b, expr: relu(x)}}",
    "two documents": "ops: {}\n---\nops: {}",
    "a directive": "%YAML 9.9\n---\nops: {f: {}}",
    "a tag": "ops: {f: {inputs: [x], expr: !mine relu(rleu(x))}}",
    "a binary": "ops: {f: {inputs: [x], expr: !!binary cmVsdSh4KQ==}}",
    "a set": "ops: !!set {f, g}",
    "a key that is a list": "ops: {[a, b]: {}}",
    "a key twice": "ops: {f: {inputs: [x], inputs: [y], expr: x * y}}",
    "an op twice": "ops:\n  f: {inputs: [x], expr: -x}\n  f: {inputs: [x], expr: -x}",
    "a NUL": "ops: {f: {inputs: [x], expr: 're\0lu(x)'}}",
    "a control character": "ops: {f: {inputs: [x], expr: 're\x1blu(x)'}}",
    "a letter of another script": "ops: {f: {inputs: [x], expr: r\u0435lu(x)}}",
    "digits of another script": "ops: {f: {inputs: [x], params: {p: ٣}, expr: x * p}}",
    "carriage returns": "ops:\r\n  f:\r\n    inputs: [x]\r\n    expr: rleu(x)\r\n",
    "a block": "ops:\n  f:\n    inputs: [x]\n    expr: |\n      relu(x\n",
    "a folded block": "ops:\n  f:\n    inputs: [x]\n    expr: >-\n      relu(\n      rleu(x))\n",
    "a deep list": "ops: " + "[" * 5000,
    "a deep mapping": "ops: " + "{a: " * 3000,
    "a deep expression": "ops: {f: {inputs: [x], expr: '" + "relu(" * 300 + "x" + ")" * 300 + "'}}",
    "a long expression": "ops: {f: {inputs: [x], expr: '" + "x + " * 5000 + "x'}}",
    "a huge number": "ops: {f: {inputs: [x], params: {p: 1" + "0" * 400 + "}, expr: x * p}}",
    "a sexagesimal": "ops: {f: {inputs: [x], params: {p: 1:30}, expr: x * p}}",
    "a quoted number": "ops: {f: {inputs: [x], params: {p: '7.0'}, expr: x * p}}",
    "not a number": "ops: {f: {inputs: [x], params: {p: .nan}, expr: x * p}}",
    "much of it": "[" * 1_000_000,
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_a_spec_error_that_says_where(name):
    found = outcome(BROKEN[name])
    assert isinstance(found, SpecError)
    lines = BROKEN[name].splitlines()
    for problem in found.problems:
        assert 0 <= problem.line <= len(lines) + 1
        assert problem.message and len(str(problem)) < 1500
        assert problem.line or name in ("a deep list", "a deep mapping", "much of it", "a NUL", "a control character")


_NODES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8)
    | st.sampled_from(["x", "y", "gate", "native", "cuda", "square(relu(x))", "x * y", *PRIMITIVES]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from([*OP_KEYS, *FILE_KEYS, "halves", "pairs", "x", "f", "cpu", "float16"]), inner,
                      max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(_NODES.map(yaml.safe_dump) | st.text(max_size=200))
@example('ops: {f: {expr: "\\U99999999"}}')
@example("ops: {<<: *none}")
@example("ops: &a {f: *a}")
@example("? ? ? x")
@example("%YAML 9.9\n---\nops: {}")
@example("\ufeffops: {f: {inputs: [x], expr: rleu(x)}}")
@example("\ud800")
def test_any_text_is_a_spec_or_a_spec_error_that_tells_its_problems(text):
    found = outcome(text)
    assert isinstance(found, SpecFile) or found.problems


@given(st.dictionaries(st.sampled_from(OP_KEYS), _NODES), st.sampled_from(["f", "relu", "9", "x" * 300]))
def test_any_stanza_is_an_op_or_a_spec_error_at_its_place(stanza, name):
    text = yaml.safe_dump({"ops": {name: stanza}})
    found = outcome(text)
    if isinstance(found, SpecFile):
        assert [op.name for op in found.ops] == [name]
    else:
        lines = len(text.splitlines())
        assert all(1 <= p.line <= lines + 1 and p.path.startswith("$.ops") for p in found.problems)


NEAR = """# A file to edit.
namespace: near
platforms: {cpu: [native]}
ops:
  gated: {inputs: {x: {halves: [gate, up]}, bias: vector}, params: {limit: 7.0}, expr: silu(gate + bias) * up * limit}
  folded:
    doc: "Two \\"lines\\"."
    inputs: [x]
    expr: >-
      where(x > 0,
      x, expm1(x))
    tolerance: {float16: 1e-3}
"""
PIECES = [*":-?,[]{}#&*!|>'\"%@` \t\n\r\0\u2028", "- ", ": ", "&a", "*a", "<<: ", "!!binary ", "---\n", "...\n",
          "\ufeff", "\u0445", "\\x41", "\\U99999999", "1e999", "null", "1:30", "~", "expr", "x"]  # fmt: skip


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 6), st.sampled_from(["", *PIECES])), min_size=1, max_size=4))
def test_an_edited_spec_is_a_spec_or_a_spec_error_at_a_line_of_it(edits):
    text = NEAR
    for at, length, piece in edits:
        start = round(at * len(text))
        text = text[:start] + piece + text[start + length :]
    found = outcome(text)
    if isinstance(found, SpecError):
        assert all(0 <= p.line <= len(text.splitlines()) + 1 and p.column >= 0 for p in found.problems)


def test_a_file_that_is_too_large_is_refused_before_it_is_read():
    (problem,) = outcome("#" * (MAX_SIZE + 1)).problems
    assert problem.message == "the file has 200,001 characters; a spec file may have 200,000"


def test_of_very_many_problems_the_first_are_told():
    error = outcome("ops:\n" + "  f: {}\n" * 500)
    assert len(error.problems) == 501
    assert str(error).splitlines()[99:] == [str(error.problems[99]), "... and 401 problems more"]


def test_a_choice_may_depend_on_params_alone():
    (spec,) = ops_of(
        "inputs: [x], params: {limit: 2}, expr: 'where(limit < 1, relu(x), x * where(limit < 3, 2, limit))'"
    )
    run = provider("native", "").lower(spec)
    x = torch.tensor([-1.0, 3.0])
    assert run(x, 0.0).tolist() == [0.0, 3.0]
    assert run(x, 2.0).tolist() == [-2.0, 6.0]
    assert run(x, 4.0).tolist() == [-4.0, 12.0]
    for limit in (0.0, 2.0, 4.0):
        wide, limit_tensor = x.double(), torch.tensor(limit, dtype=torch.float64)
        assert torch.equal(run(wide, limit), evaluate(spec.expr, {"x": wide, "limit": limit_tensor}, torch.float64))


def test_inputs_that_are_broadcast():
    (spec,) = ops_of("inputs: {x: {halves: [a, b]}, bias: vector, scale: scalar}, expr: (a + bias) * b * scale")
    assert [str(input) for input in spec.inputs] == ["x: halves[a, b]", "bias: vector", "scale: scalar"]
    assert spec.definition == "(x: halves[a, b], bias: vector, scale: scalar) -> (a + bias) * b * scale"
    plain = ops_of("inputs: {x: {halves: [a, b]}, bias: , scale: scalar}, expr: (a + bias) * b * scale")[0]
    assert plain.hash != spec.hash


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ("{x: , b: column}",
         "1:28: unknown layout 'column' of input 'b'; valid: 'vector', 'scalar' at $.ops.f.inputs.b"),
        ("{b: vector, x: }",
         "1:19: the first input gives the op its shape; put one that is not broadcast first at $.ops.f.inputs"),
    ],
)  # fmt: skip
def test_a_problem_of_a_broadcast_input(inputs, expected):
    assert said(f"ops: {{f: {{inputs: {inputs}, expr: x + b}}}}") == [f"ops.yaml:{expected}"]


@pytest.mark.parametrize(
    ("expr", "message"),
    [
        ("x - mean(x)", "unknown primitive 'mean'; an expression has no reductions, an op is elementwise: compute it "
                        "outside and pass it as an input"),
        ("x / max(x)", "unknown primitive 'max'; write maximum(a, b) for two values; an expression has no reductions, "
                       "an op is elementwise: compute it outside and pass it as an input"),
        ("chunk(x, 2)", "unknown primitive 'chunk'; an expression has no shapes or indices: declare halves, pairs or a "
                        "vector under 'inputs'"),
        ("x[0]",
         "unexpected '['; an expression cannot index: name the halves or pairs of a packed input under 'inputs'"),
        ("x.shape", "unexpected '.'; an expression has no attributes or methods: call a primitive, as in relu(x)"),
        ("x ** 2", "unexpected '**'; write square(x) for x ** 2"),
        ("pow(x, 3)", "unknown primitive 'pow'; write square(x), or x * x * x"),
        ("gelu(x, approximate)", "'gelu' takes 1 argument; found 2"),
        ("gelu(x, approximate=1)", "unexpected '='; nothing is assigned or passed by keyword"),
        ("dropout(x)", "unknown primitive 'dropout'; an expression has no randomness: pass a mask as an input"),
        ("leaky_relu(x)", "unknown primitive 'leaky_relu'; write where(x > 0, x, 0.01 * x)"),
        ("x * (x > 0)", "a comparison is only allowed as the first argument of 'where'"),
    ],
)  # fmt: skip
def test_what_an_expression_may_not_say_names_the_way_out(expr, message):
    _, _, caret = said_of(f"inputs: [x], expr: '{expr}'")
    assert caret.lstrip(" ^") == message


# ** gradients that a file declares, and what a backward keeps **

GATED = "{x: {halves: [gate, up]}}"


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("{inputs: [x], expr: relu(x), grad: relu(z)}", "unknown name 'z'"),
        ("{inputs: [x], expr: relu(x), grad_from_output: 2 * x * grad}", "unknown name 'x'"),
        ("{inputs: [x, y], expr: x * y, grad: grad * y}", "must give each of x, y its gradient, as a mapping"),
        ("{inputs: [x, y], expr: x * y, grad: {x: grad * y}}", "gives no gradient of 'y'"),
        ("{inputs: [x], expr: relu(x), grad: {x: 2 * grad, z: 3 * grad}}", "op 'f' has no 'z'"),
        ("{inputs: [x], expr: relu(x), grad: [x]}", "'grad' must be a mapping"),
        (f"{{inputs: {GATED}, expr: gate * up, grad_from_output: {{gate: y * grad, up: grad * y}}}}", "result alone"),
        ("{inputs: [x], params: {y: 1}, expr: x * y, grad_from_output: y * grad}", "rename the param"),
        ("{inputs: [x], expr: relu(x), save: output}", "needs 'grad_from_output'"),
        ("{inputs: [x], expr: relu(x), save: outptu}", "unknown save 'outptu'; did you mean 'output'?"),
        ("{inputs: [x], expr: relu(x), save: 1}", "save must be text"),
    ],
)  # fmt: skip
def test_a_wrong_gradient_or_save_is_told_in_words(entry, problem):
    with pytest.raises(SpecError, match=re.escape(problem)) as raised:
        read_text(f"ops:\n  f: {entry}\n")
    assert len(raised.value.problems) == 1


def test_a_declared_gradient_is_part_of_the_definition_and_replaces_the_derived_one():
    plain = read_text("ops: {f: {inputs: [x], expr: square(relu(x))}}").ops[0]
    nicer = read_text("ops: {f: {inputs: [x], expr: square(relu(x)), grad: 2 * relu(x) * grad}}").ops[0]
    kept = read_text("ops: {f: {inputs: [x], expr: square(relu(x)), grad_from_output: 2 * sqrt(y) * grad}}").ops[0]
    assert len({plain.hash, nicer.hash, kept.hash}) == 3
    assert str(nicer.backward.exprs[0]) == "2 * relu(x) * grad"
    assert kept.backward.exprs == plain.backward.exprs
    assert kept.backward_from_output.formula == "f_backward_from_output(grad, y) = 2 * sqrt(y) * grad"
    assert kept.in_place.schema == "f_(Tensor(a!) x) -> Tensor(a!)"
    assert plain.backward_from_output is None and plain.in_place is None
