"""The JSON Schema of spec files says what the verifier says, but for what lies inside expressions and between entries.

``python tests/test_schema.py`` writes the shipped schema anew.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import hypothesis
import jsonschema
import pytest
import yaml
from hypothesis import strategies as st

from relu2ir import names, schema, specfile
from relu2ir.errors import Problem, SpecError

ROOT = Path(__file__).parent.parent
SHIPPED = ROOT / "relu2ir" / "ops.schema.json"
VALIDATOR = jsonschema.Draft202012Validator(schema.schema())


def problems(document: Any) -> tuple[Problem, ...]:
    """What the verifier says of a document that was written as YAML."""
    try:
        specfile.read_text(yaml.safe_dump(document, sort_keys=False))
    except SpecError as error:
        return error.problems
    return ()


def agree(document: Any) -> bool:
    """Whether the schema accepts the document; fails if the verifier says otherwise."""
    found, valid = problems(document), VALIDATOR.is_valid(document)
    if valid:
        assert all(problem.relation for problem in found), (document, found)
    else:
        assert found, (document, next(VALIDATOR.iter_errors(document)).message)
    return valid


def test_the_shipped_schema_is_the_generated_one():
    assert SHIPPED.read_text() == schema.text(), "python tests/test_schema.py writes it"
    jsonschema.Draft202012Validator.check_schema(schema.schema())


def test_the_library_s_own_file_is_valid_and_points_to_it():
    text = (ROOT / "ops.yaml").read_text()
    assert VALIDATOR.is_valid(yaml.safe_load(text))
    first = text.splitlines()[0]
    assert first == "# yaml-language-server: $schema=relu2ir/ops.schema.json"
    assert (ROOT / first.partition("=")[2]).exists()


OP = {"inputs": ["x"], "expr": "relu(x)"}
WRONG: dict[str, Any] = {
    "no mapping": ["ops"],
    "nothing": {},
    "nothing but empty platforms": {"platforms": {}},
    "an unknown key": {"ops": {"f": OP}, "kernels": {}},
    "an op without inputs": {"ops": {"f": {"expr": "relu(x)"}}},
    "an op without expr": {"ops": {"f": {"inputs": ["x"]}}},
    "no inputs": {"ops": {"f": OP | {"inputs": []}}},
    "an empty mapping of inputs": {"ops": {"f": OP | {"inputs": {}}}},
    "an input twice": {"ops": {"f": OP | {"inputs": ["x", "x"]}}},
    "a reserved input": {"ops": {"f": OP | {"inputs": ["lambda"]}}},
    "an input named like a primitive": {"ops": {"f": OP | {"inputs": ["relu"]}}},
    "an op that ends in _backward": {"ops": {"f_backward": OP}},
    "an op in capitals": {"ops": {"F": OP}},
    "torch's namespace": {"namespace": "aten", "ops": {"f": OP}},
    "three parts": {"ops": {"f": OP | {"inputs": {"x": {"halves": ["a", "b", "c"]}}}}},
    "two layouts": {"ops": {"f": OP | {"inputs": {"x": {"halves": ["a", "b"], "pairs": ["c", "d"]}}}}},
    "an unknown layout": {"ops": {"f": OP | {"inputs": {"x": None, "y": "column"}}}},
    "a param that is text": {"ops": {"f": OP | {"params": {"limit": "7.0"}}}},
    "a param that is true": {"ops": {"f": OP | {"params": {"limit": True}}}},
    "a subnormal param": {"ops": {"f": OP | {"params": {"limit": 1e-310}}}},
    "a negative tolerance": {"ops": {"f": OP | {"tolerance": {"float16": -1.0}}}},
    "a tolerance of an unknown type": {"ops": {"f": OP | {"tolerance": {"float8": 1.0}}}},
    "an unknown platform": {"platforms": {"tpu": ["native"]}},
    "a row without native": {"platforms": {"cpu": ["cpp"]}},
    "a doc that is a number": {"ops": {"f": OP | {"doc": 3}}},
    "an expr that is a list": {"ops": {"f": OP | {"expr": ["relu(x)"]}}},
}


@pytest.mark.parametrize("name", WRONG)
def test_both_refuse(name):
    assert not agree(WRONG[name])


RELATIONS: dict[str, Any] = {
    "an expr that cannot be read": {"ops": {"f": OP | {"expr": "rleu(x)"}}},
    "an input that is not read": {"ops": {"f": OP | {"inputs": ["x", "y"]}}},
    "a name declared in two places": {"ops": {"f": OP | {"params": {"x": 1.0}}}},
    "a broadcast input first": {"ops": {"f": OP | {"inputs": {"x": "vector"}}}},
    "a row that does not end with native": {"platforms": {"cpu": ["native", "cpp"]}},
}


@pytest.mark.parametrize("name", RELATIONS)
def test_only_the_verifier_sees_relations(name):
    assert agree(RELATIONS[name]) and problems(RELATIONS[name])


# ** documents near validity **

NAMES = st.sampled_from(["x", "y", "gate", "up", "bias", "limit", "f2", "a_b"])
ODD_NAMES = st.sampled_from([
    "X", "", "1x", "x_", "_x", "v0", "v10", "grad", "in", "relu", "clamp", "x y", "yes", "on", "é", "f_backward",
    "aten", "null", "lambda", "9", "1e3", "true",
])  # fmt: skip
NUMBERS = st.one_of(
    st.sampled_from([0, 1, -7, 0.0, 1e-3, 1.702, 5e-324, 1e308, 10**400, 2**53]),
    st.floats(allow_nan=False, allow_infinity=False),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, NAMES, ODD_NAMES, st.sampled_from(["halves", "vector", "7.0"]))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | ODD_NAMES, inner, max_size=3),
    max_leaves=4,
)
INPUTS = st.one_of(
    st.lists(NAMES, min_size=1, max_size=3, unique=True),
    st.dictionaries(
        NAMES,
        st.one_of(
            st.none(),
            st.sampled_from(["vector", "scalar"]),
            st.builds(
                lambda layout, parts: {layout: parts},
                st.sampled_from(["halves", "pairs"]),
                st.lists(NAMES, min_size=2, max_size=2, unique=True),
            ),
        ),
        min_size=1,
        max_size=3,
    ),
)
OPS = st.fixed_dictionaries(
    {"inputs": INPUTS, "expr": st.sampled_from(["relu(x)", "silu(gate) * up", "square(relu(x + bias))", "x +", "2"])},
    optional={
        "doc": st.just("What it is."),
        "source": st.just("arXiv:2109.08668"),
        "params": st.dictionaries(NAMES, NUMBERS, max_size=2),
        "tolerance": st.dictionaries(st.sampled_from(specfile.DTYPES), NUMBERS, max_size=2),
    },
)
ROWS = st.lists(st.sampled_from(["cuda", "triton", "cpp", "native"]), min_size=1, max_size=3)
DOCUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "namespace": NAMES | ODD_NAMES,
        "platforms": st.dictionaries(st.sampled_from(["cuda", "cpu", "xpu"]), ROWS, max_size=2),
        "ops": st.dictionaries(NAMES, OPS, max_size=2),
    },
)


@st.composite
def mutated(draw: st.DrawFn) -> Any:
    """A document with one place in it changed: a value replaced, a key renamed, dropped or added."""
    document = copy.deepcopy(draw(DOCUMENTS))
    place: Any = document
    while isinstance(place, dict | list) and place:
        key = draw(st.sampled_from(list(place) if isinstance(place, dict) else list(range(len(place)))))
        below = place[key]
        if isinstance(below, dict | list) and below and draw(st.integers(0, 3)):
            place = below
            continue
        kind = draw(st.sampled_from(["replace", "rename", "drop", "add"]))
        if kind == "replace":
            place[key] = draw(VALUES)
        elif kind == "drop":
            del place[key]
        elif isinstance(place, dict):
            place[draw(NAMES | ODD_NAMES)] = place.pop(key) if kind == "rename" else draw(VALUES)
        else:
            place.append(draw(VALUES))
        break
    return document


@hypothesis.settings(max_examples=600)
@hypothesis.given(DOCUMENTS | mutated() | mutated())
def test_the_schema_and_the_verifier_agree(document):
    agree(document)


@hypothesis.given(st.text(alphabet="abvgrad019_X ", max_size=8))
def test_a_name_is_judged_alike(name):
    for kind in names.KINDS:
        matches = bool(jsonschema.Draft202012Validator({"pattern": names.pattern(kind)}).is_valid(name))
        assert matches == (names.problem(name, kind) is None)


if __name__ == "__main__":
    SHIPPED.write_text(schema.text())
