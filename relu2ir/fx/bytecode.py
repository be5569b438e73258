"""What a function could do otherwise at its next call, told by its bytecode and by what its names stand for."""

from __future__ import annotations

import builtins
import dis
import math
import operator
from collections.abc import Callable, Collection, Hashable
from functools import cache
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch

_TRUSTED = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_BUILTINS = frozenset({
    "abs", "dict", "enumerate", "float", "int", "len", "list", "max", "min", "pow", "range", "reversed", "round",
    "slice", "sum", "super", "tuple", "zip",
})  # fmt: skip
_OPCODES = {
    "IS_OP": "compares with None",
    "POP_JUMP_IF_NONE": "compares with None",
    "POP_JUMP_IF_NOT_NONE": "compares with None",
    "STORE_ATTR": "stores an attribute",
    "DELETE_ATTR": "deletes an attribute",
    "STORE_SUBSCR": "stores an item",
    "DELETE_SUBSCR": "deletes an item",
    "STORE_GLOBAL": "stores a global",
    "DELETE_GLOBAL": "deletes a global",
    "IMPORT_NAME": "imports a module",
    "BEFORE_WITH": "has a with block",
    "SETUP_WITH": "has a with block",
    "LOAD_SPECIAL": "has a with block",
    "PUSH_EXC_INFO": "has a try or with block",
    "SETUP_FINALLY": "has a try block",
    "MATCH_CLASS": "matches types",
    "MATCH_MAPPING": "matches types",
    "MATCH_SEQUENCE": "matches types",
    "MATCH_KEYS": "matches types",
    "LOAD_BUILD_CLASS": "defines a class",
}  # fmt: skip


class ModeDependent(Exception):
    """The forward could do otherwise at another call, in the words of the exception."""


@cache
def is_trusted(code: CodeType) -> bool:
    return code.co_filename.startswith(_TRUSTED)


def judge(code: CodeType, scope: dict[str, Any], judged: set[CodeType], kind: type) -> None:
    """Refuse ``code``, and the code written inside it, for what it could do."""
    judged.add(code)
    instructions = list(dis.get_instructions(code))
    for at, instruction in enumerate(instructions, 1):
        name = instruction.opname.replace("_FORWARD", "").replace("_BACKWARD", "")
        if name in _OPCODES:
            raise ModeDependent(_OPCODES[name])
        if name.startswith("INPLACE_") or (name == "BINARY_OP" and instruction.argrepr.endswith("=")):
            raise ModeDependent("assigns with an operator such as +=, which fx writes as +")
        if name in ("LOAD_GLOBAL", "LOAD_NAME"):
            _judge_global(instruction.argval, scope, instructions[at:])
            if instruction.argval == "super":
                _judge_super(kind, instructions[at:])
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            judge(constant, scope, judged, kind)


def _judge_super(kind: type, following: list[dis.Instruction]) -> None:
    """Of ``super()`` only functions may be read: it looks into the classes unseen."""
    loads = (each.argval for each in following if each.opname in ("LOAD_SUPER_ATTR", "LOAD_ATTR", "LOAD_METHOD"))
    name = str(next(loads, None))
    if not all(isinstance(vars(each).get(name, _judge_super), FunctionType) for each in kind.__mro__):
        raise ModeDependent(f"reads super().{name}, which may change")


def _judge_global(name: str, scope: dict[str, Any], following: list[dis.Instruction]) -> None:
    if name not in scope:
        builtin = getattr(builtins, name, None)
        if name not in _BUILTINS and not (isinstance(builtin, type) and issubclass(builtin, BaseException)):
            raise ModeDependent(f"calls {name}()")
        return
    value, path, library = scope[name], name, None
    for instruction in following:
        if not isinstance(value, ModuleType) or instruction.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            if isinstance(value, FunctionType) and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                raise ModeDependent(f"reads {path}.{instruction.argval}, which may change")
            break
        library, value, path = value, getattr(value, instruction.argval, None), f"{path}.{instruction.argval}"
    if not (isinstance(value, float) and library in (torch, math)):  # torch.inf, math.pi
        judge_value(path, value)


def judge_value(name: str, value: Any) -> None:
    """Accept what cannot change, and functions that fx records or that are judged when they are entered."""
    value = getattr(value, "__wrapped__", value) if _is_patched_by_fx(value) else value
    if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket | torch.dtype):
        return
    if callable(value) and isinstance(value, Hashable) and value in _recorded():
        return
    if isinstance(value, FunctionType) and not is_trusted(value.__code__):
        return
    if isinstance(value, BuiltinFunctionType) and value.__module__ in (math.__name__, operator.add.__module__):
        return
    raise ModeDependent(f"calls {name}" if callable(value) else f"reads {name}, which may change")


def _is_patched_by_fx(value: Any) -> bool:
    return isinstance(value, FunctionType) and value.__code__.co_filename.endswith("_symbolic_trace.py")


@cache
def _recorded() -> Collection[Callable[..., Any]]:
    """The functions of torch that fx writes into the graph when they are given a proxy."""
    return frozenset(torch.overrides.get_testing_overrides())
