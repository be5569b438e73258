"""What ops, inputs, parts, params and namespaces may be called: one pattern for each. Needs no torch.

The verifier of spec files and the JSON Schema that editors read take these patterns from here.
"""

from __future__ import annotations

import keyword
import re

from relu2ir.ir.primitives import PRIMITIVES

RULE = "use lower-case letters, digits and '_', beginning with a letter and not ending in '_'"
_FORM = "[a-z]([a-z0-9_]*[a-z0-9])?"

# Words that generated code and calls use themselves (v0, grad, provider, ...), that torch.ops has as attributes (name,
# higher_order, loaded_libraries), or that C++ keeps; Python's come on top, and for what an expr reads the primitives.
_WORDS = re.findall(
    r"\w+",
    """
    grad self in out params torch tl std provider save name higher_order loaded_libraries alignas alignof and_eq
    asm auto bitand bitor bool case catch char char8_t char16_t char32_t co_await co_return co_yield compl
    concept const const_cast consteval constexpr constinit decltype default delete do double dynamic_cast enum
    explicit export extern false float friend goto inline int long mutable namespace new noexcept not_eq
    nullptr operator or_eq private protected public register reinterpret_cast requires short signed sizeof
    static static_assert static_cast struct switch template this thread_local throw true typedef typeid
    typename union unsigned using virtual void volatile wchar_t xor xor_eq
    """,
)
_KEYWORDS = [word for word in keyword.kwlist if word.islower()]
TORCH_NAMESPACES = ("aten", "prim", "prims")

_RESERVED = ["v[0-9]+", *sorted({*_WORDS, *_KEYWORDS})]
_READ = [*_RESERVED, *PRIMITIVES]
KINDS = {
    "an op": _RESERVED,
    "a namespace": [*_RESERVED, *TORCH_NAMESPACES],
    "an input": _READ,
    "a part": _READ,
    "a param": _READ,
}


def pattern(kind: str) -> str:
    """The regular expression of what may name ``kind``, one of `KINDS`; also valid in JSON Schema."""
    backward = "(?!.*_backward(_from_output)?$)" if kind == "an op" else ""
    return f"^(?!({'|'.join(KINDS[kind])})$){backward}{_FORM}$"


def problem(name: str, kind: str) -> str | None:
    """Why ``name`` cannot name ``kind``, or None if it can."""
    if re.fullmatch(pattern(kind).strip("^$"), name, re.ASCII):
        return None
    why = RULE
    if kind == "an op" and name.endswith(("_backward", "_backward_from_output")):
        why = "derived gradient ops end in '_backward' or '_backward_from_output'"
    elif kind == "a namespace" and name in TORCH_NAMESPACES:
        why = "it is torch's own; choose another"
    elif re.fullmatch("|".join(KINDS[kind]), name):
        why = "it is a reserved word; choose another"
    return f"'{name}' cannot name {kind}: {why}"
