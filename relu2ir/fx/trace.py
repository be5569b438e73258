"""One module's own forward as a graph, its children as leaves, or the reason why a trace of it would not stay true.

A trace bakes in what it saw. So a forward is refused, before it has run a line, if it (or a Python function that it
calls) could do otherwise next time or does more than compute: it reads a plain attribute or a global that may change,
compares with None, looks at types, enters a ``with`` or ``try`` block, asks for grad mode, autocast or compilation, or
stores anything. Code is judged by its bytecode when it is entered; attributes when they are read.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import math
import operator
import sys
import sysconfig
import types
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import fx, nn

from relu2ir.fx.reading import has_own_forward

_TRUSTED = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_STDLIB = sysconfig.get_path("stdlib")
_SITE_PACKAGES = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_COUNTED = frozenset(getattr(nn.Sequential, name).__code__ for name in ("__iter__", "__len__", "__getitem__"))
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


class Untraceable(Exception):
    """The forward cannot be written as a graph."""


def own_forward(module: nn.Module) -> FunctionType | None:
    """The Python function that ``module`` runs, below its decorators; None when it is not one of its class's own."""
    forward = type(module).forward
    written = inspect.unwrap(forward)
    if has_own_forward(module) or not isinstance(written, FunctionType) or _is_trusted(written.__code__):
        return None
    return written


def trace(module: nn.Module) -> fx.Graph:
    """The graph of ``module``'s own forward; raises ModeDependent or Untraceable. ``module`` is not changed."""
    if hasattr(type(module).forward, "__wrapped__"):
        raise ModeDependent("is decorated")
    watched = _watched(module, own=True, kinds={})
    tracer = _Tracer()
    try:
        with _watching(type(module).forward):
            graph = tracer.trace(watched)
    except ModeDependent:
        raise
    except Exception as error:  # whatever a user's code raises when it is given proxies
        raise Untraceable(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from None
    tensors = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    for node in graph.nodes:
        if node.op == "get_attr" and node.target not in tensors:
            raise ModeDependent("computes a tensor that does not depend on its arguments")
    return graph


class _Tracer(fx.Tracer):
    """Children are leaves; parameters and buffers are read by the graph, not by the trace; nodes know their line."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _is_trusted(frame.f_code):
            frame = frame.f_back
        if frame is not None and node.op != "placeholder":
            node.stack_trace = f'File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}'
        return node


@cache
def _is_trusted(code: CodeType) -> bool:
    return code.co_filename.startswith(_TRUSTED)


def _place(code: CodeType) -> tuple[str, str, int]:
    # fx gives a forward with *args another code object.
    return code.co_filename, code.co_name, code.co_firstlineno


@cache
def _is_of_python(code: CodeType) -> bool:
    """The standard library, and what it compiles (``<string>``, ``<frozen ...>``)."""
    file = code.co_filename
    return file.startswith("<") or (file.startswith(_STDLIB) and not file.startswith(_SITE_PACKAGES))


def _is_users(frame: FrameType, judged: set[CodeType]) -> bool:
    """Whether ``frame`` runs on behalf of code that was judged: called by it, by way of the standard library or not.

    Torch calls third parties too (sympy, typing_extensions), which are none of the user's.
    """
    caller = frame.f_back
    while caller is not None and caller.f_code not in judged and _is_passed_over(caller.f_code):
        caller = caller.f_back
    return caller is not None and caller.f_code in judged


def _is_passed_over(code: CodeType) -> bool:
    return _is_of_python(code) or code is _Watched.__getattribute__.__code__


class _Watched:
    """The class of a copy that is traced: reading or storing a plain attribute from outside torch is refused."""

    _relu2ir_own: bool  # whether it is the module whose forward is traced, rather than a module below it

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Run no registration of the user's classes."""

    def __getattribute__(self, name: str) -> Any:
        if _is_trusted(sys._getframe(1).f_code):
            return object.__getattribute__(self, name)
        state = object.__getattribute__(self, "__dict__")
        for kind in ("_parameters", "_buffers", "_modules"):
            if name in state[kind]:
                if state[kind][name] is None:
                    raise ModeDependent(f"reads self.{name}, which is None now")
                if isinstance(state[kind][name], _CONTAINERS):
                    raise ModeDependent(f"reads self.{name}, whose members may change")
                raise AttributeError(name)  # nn.Module.__getattr__ answers, with a proxy where fx wants one
        found = next((vars(kind)[name] for kind in type(self).__mro__ if name in vars(kind)), None)
        method = isinstance(found, FunctionType | property | staticmethod | classmethod)
        of_torch = hasattr(nn.Module, name) and name != "forward"
        if name in state or of_torch or not method or not type(self)._relu2ir_own:
            raise ModeDependent(f"reads self.{name}, which may change")
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not _is_trusted(sys._getframe(1).f_code):
            raise ModeDependent(f"stores self.{name}")
        super().__setattr__(name, value)


def _watched(module: nn.Module, own: bool, kinds: dict[tuple[type, bool], type]) -> nn.Module:
    """A copy of ``module`` and all below it that shares every tensor and refuses what a trace would bake in."""
    if isinstance(module, torch.jit.ScriptModule):
        return module
    kind = (type(module), own)
    if kind not in kinds:
        members = {"_relu2ir_own": own, "__module__": type(module).__module__}
        kinds[kind] = types.new_class(
            type(module).__name__, (_Watched, type(module)), exec_body=lambda scope: scope.update(members)
        )
    copy: Any = object.__new__(kinds[kind])
    children = {
        name: child if child is None else _watched(child, False, kinds) for name, child in module._modules.items()
    }
    vars(copy).update(vars(module) | {"_modules": children})
    return copy


@contextmanager
def _watching(forward: FunctionType) -> Iterator[None]:
    """Judge ``forward`` and every function that it leads to before its first line runs, for the time of the block."""
    judged: set[CodeType] = set()
    entry = _place(forward.__code__)

    def enter(frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code in _COUNTED:
            raise ModeDependent("reads the members of an nn.Sequential, which may change")
        if event != "call" or code in judged or _is_trusted(code):
            return
        if _place(code) == entry or _is_users(frame, judged):
            closed_over = {name: frame.f_locals.get(name) for name in code.co_freevars if name != "__class__"}
            for name, value in closed_over.items():
                _judge_value(name, value)
            _judge(code, frame.f_globals, judged)

    before = sys.getprofile()
    sys.setprofile(enter)
    try:
        yield
    finally:
        sys.setprofile(before)


def _judge(code: CodeType, scope: dict[str, Any], judged: set[CodeType]) -> None:
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
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _judge(constant, scope, judged)


def _judge_global(name: str, scope: dict[str, Any], following: list[dis.Instruction]) -> None:
    if name not in scope:
        builtin = getattr(builtins, name, None)
        if name not in _BUILTINS and not (isinstance(builtin, type) and issubclass(builtin, BaseException)):
            raise ModeDependent(f"calls {name}()")
        return
    value, path, library = scope[name], name, None
    for instruction in following:
        if not isinstance(value, ModuleType) or instruction.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            break
        library, value, path = value, getattr(value, instruction.argval, None), f"{path}.{instruction.argval}"
    if not (isinstance(value, float) and library in (torch, math)):  # torch.inf, math.pi
        _judge_value(path, value)


def _judge_value(name: str, value: Any) -> None:
    """Accept what cannot change, and functions that fx records or that are judged when they are entered."""
    value = getattr(value, "__wrapped__", value) if _is_patched_by_fx(value) else value
    if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket | torch.dtype) or value in _recorded():
        return
    if isinstance(value, FunctionType) and not _is_trusted(value.__code__):
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
