"""The JSON Schema of spec files, for completion and checks in editors, from the definitions that the verifier reads.

It says all that holds of one entry by itself; what lies inside an expression or between entries only the verifier
knows. ``python -m relu2ir.schema`` prints it; the package ships it as ``ops.schema.json``. Needs no torch.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from relu2ir import names, specfile
from relu2ir.ir.primitives import PRIMITIVES
from relu2ir.platforms import PLATFORMS

_SMALLEST, _LARGEST = sys.float_info.min, sys.float_info.max
_FINITE = {"type": "number", "minimum": -_LARGEST, "maximum": _LARGEST}
_CALLS = ", ".join(sorted(name for name in PRIMITIVES))


def schema() -> dict[str, Any]:
    """The schema as plain data, draft 2020-12."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "relu2ir spec file",
        "description": "Elementwise ops, each declared once.",
        "type": "object",
        "properties": dict(zip(specfile.FILE_KEYS, (_namespace(), _platforms(), _ops()), strict=True)),
        "additionalProperties": False,
        "anyOf": [
            {"required": ["ops"]},
            {"required": ["platforms"], "properties": {"platforms": {"minProperties": 1}}},
        ],
    }


def _namespace() -> dict[str, Any]:
    return {
        "description": f"Where torch and relu2ir.ops hold the ops; {specfile.DEFAULT_NAMESPACE} without it.",
        "type": "string",
        "pattern": names.pattern("a namespace"),
    }


def _platforms() -> dict[str, Any]:
    row = {
        "description": "Providers in order of preference, native last.",
        "type": "array",
        "items": {"type": "string"},
        "uniqueItems": True,
        "contains": {"const": "native"},
    }
    return {
        "description": "The row of providers of each platform that this file changes.",
        "type": "object",
        "properties": dict.fromkeys(PLATFORMS, row),
        "additionalProperties": False,
    }


def _ops() -> dict[str, Any]:
    return {
        "description": "The ops by name.",
        "type": "object",
        "propertyNames": {"pattern": names.pattern("an op")},
        "additionalProperties": _op(),
    }


def _op() -> dict[str, Any]:
    properties: dict[str, Any] = {
        "doc": {"description": "What the op is, for readers.", "type": "string"},
        "source": {"description": "Where its formula comes from: arXiv:2109.08668, a class, ...", "type": "string"},
        "inputs": _inputs(),
        "params": {
            "description": "Numbers that a caller may set, with their defaults.",
            "type": "object",
            "propertyNames": {"pattern": names.pattern("a param")},
            "additionalProperties": _FINITE
            | {"anyOf": [{"const": 0}, {"minimum": _SMALLEST}, {"maximum": -_SMALLEST}]},
        },
        "expr": {
            "description": f"One element of the result, of names, numbers, + - * / and calls: {_CALLS}.",
            "type": "string",
        },
        "grad": _gradient("The gradient where it is nicer than the derived one, by grad and what the expr reads."),
        "grad_from_output": _gradient("The gradient by y, the result, and grad: then y can be kept for it, not x."),
        "save": {"description": "What a backward keeps unless asked otherwise.", "enum": list(specfile.SAVES)},
        "tolerance": {
            "description": "By type, how far from the exact result a result may be, relative to it.",
            "type": "object",
            "properties": dict.fromkeys(specfile.DTYPES, _FINITE | {"minimum": 0}),
            "additionalProperties": False,
        },
    }
    return {
        "type": "object",
        "properties": {key: properties[key] for key in specfile.OP_KEYS},
        "additionalProperties": False,
        "required": list(specfile.REQUIRED_KEYS),
    }


def _gradient(description: str) -> dict[str, Any]:
    text = {"type": ["string", "number"]}
    by_name = {
        "type": "object",
        "propertyNames": {"pattern": names.pattern("a part")},
        "minProperties": 1,
        "additionalProperties": text,
    }
    return {"description": description, "anyOf": [text, by_name]}


def _inputs() -> dict[str, Any]:
    packed = {
        layout: {
            "description": specfile.LAYOUTS[layout],
            "type": "array",
            "items": {"type": "string", "pattern": names.pattern("a part")},
            "minItems": 2,
            "maxItems": 2,
            "uniqueItems": True,
        }
        for layout in specfile.PACKED
    }
    broadcast = [{"description": specfile.LAYOUTS[layout], "const": layout} for layout in specfile.BROADCAST]
    one_layout = {"type": "object", "properties": packed, "additionalProperties": False}
    return {
        "description": "The tensors: [x, y], or a mapping where one has a layout, {x: {halves: [gate, up]}, y: }.",
        "anyOf": [
            {
                "type": "array",
                "items": {"type": "string", "pattern": names.pattern("an input")},
                "minItems": 1,
                "uniqueItems": True,
            },
            {
                "type": "object",
                "propertyNames": {"pattern": names.pattern("an input")},
                "minProperties": 1,
                "additionalProperties": {
                    "anyOf": [
                        {"type": "null"},
                        *broadcast,
                        one_layout | {"minProperties": 1, "maxProperties": 1},
                    ]
                },
            },
        ],
    }


def text() -> str:
    """The schema as the file ``ops.schema.json`` has it."""
    return json.dumps(schema(), indent=1) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
