"""One module's own forward as a graph, its children as leaves, or the reason why a trace of it would not stay true.

A trace bakes in what it saw. So a forward is refused, before it has run a line, if it (or a Python function that it
calls) could do otherwise next time or does more than compute: it reads a plain attribute or a global that may change,
compares with None, looks at types, enters a ``with`` or ``try`` block, asks for grad mode, autocast or compilation, or
stores anything. Code is judged by its bytecode when it is entered; attributes when they are read.
"""

from __future__ import annotations

import inspect
import sys
import sysconfig
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import fx, nn

from relu2ir.fx.bytecode import ModeDependent, is_trusted, judge, judge_value
from relu2ir.fx.reading import has_own_forward

# The layers of torch: their methods read the state of a module that inherits them, as a user's would.
_OF_LAYERS = str(Path(nn.modules.__file__).parent)
_OF_MODULE = nn.modules.module.__file__
_ONE_AT_A_TIME = threading.RLock()  # fx patches nn.Module for the whole process while it traces
_STDLIB = sysconfig.get_path("stdlib")
_SITE_PACKAGES = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_COUNTED = frozenset(getattr(nn.Sequential, name).__code__ for name in ("__iter__", "__len__", "__getitem__"))


class Untraceable(Exception):
    """The forward cannot be written as a graph."""


def own_forward(module: nn.Module) -> FunctionType | None:
    """The Python function that ``module`` runs, below its decorators; None when it is not one of its class's own."""
    forward = type(module).forward
    written = inspect.unwrap(forward)
    if has_own_forward(module) or not isinstance(written, FunctionType) or is_trusted(written.__code__):
        return None
    return written


def trace(module: nn.Module) -> fx.Graph:
    """The graph of ``module``'s own forward; raises ModeDependent or Untraceable. ``module`` is not changed."""
    if hasattr(type(module).forward, "__wrapped__"):
        raise ModeDependent("is decorated")
    if not _reads_plainly(type(module)):
        raise ModeDependent("reads attributes by a __getattr__ of its class")
    if not all(map(_is_constant, _defaults(type(module).forward))):
        raise ModeDependent("has a default that may change")
    watched = _watched(module, own=True, kinds={})
    tracer = _Tracer()
    try:
        with _ONE_AT_A_TIME, _watching(type(module)):
            graph = tracer.trace(watched)
    except ModeDependent:
        raise
    except Exception as error:  # whatever a user's code raises when it is given proxies
        raise Untraceable(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from None
    tensors = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    for node in graph.nodes:
        if node.op == "get_attr" and node.target not in tensors:
            raise ModeDependent("computes a tensor that does not depend on its arguments")
    _insist_on_text(graph)
    return graph


def _insist_on_text(graph: fx.Graph) -> None:
    """Refuse what fx would write wrongly: arguments named as its globals are, keyword-only ones behind a default."""
    code = graph.python_code("self")
    for node in graph.find_nodes(op="placeholder"):
        if node.target in code.globals:
            raise Untraceable(f"an argument is named {node.target}, as a global of generated code is")
    try:
        compile(code.src, "forward", "exec")
    except SyntaxError as error:
        raise Untraceable(f"its arguments cannot be written again: {error.msg}") from None


def _reads_plainly(kind: type[nn.Module]) -> bool:
    return kind.__getattr__ is nn.Module.__getattr__ and kind.__getattribute__ is object.__getattribute__


def _defaults(forward: FunctionType) -> tuple[Any, ...]:
    return (*(forward.__defaults__ or ()), *(forward.__kwdefaults__ or {}).values())


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


class _Tracer(fx.Tracer):
    """Children are leaves; parameters and buffers are read by the graph, not by the trace; nodes know their line."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and is_trusted(frame.f_code):
            frame = frame.f_back
        if frame is not None and node.op != "placeholder":
            node.stack_trace = f'File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}'
        return node


class _Proxy(fx.Proxy):
    """A proxy that is not taken for a tensor where it answers by itself: its text, its class, ``operator.imul``."""

    def __getattr__(self, name: str) -> fx.Proxy:
        return _Attribute(self, name)

    def __getattribute__(self, name: str) -> Any:
        if name in ("__class__", "__doc__", "__module__", "__dict__") and _is_asked_by_a_user(sys._getframe(1)):
            raise ModeDependent(f"reads {name} of a tensor")
        return super().__getattribute__(name)

    def __repr__(self) -> str:  # str() and format() come here too
        if _is_asked_by_a_user(sys._getframe(1)):
            raise ModeDependent("makes text of a tensor")
        return super().__repr__()

    def _assigned(self, other: Any) -> Any:
        raise ModeDependent("calls an operator in place by name, which fx writes out of place")

    __iadd__ = __isub__ = __imul__ = __imatmul__ = __itruediv__ = __ifloordiv__ = __imod__ = __ipow__ = _assigned
    __iand__ = __ior__ = __ixor__ = __ilshift__ = __irshift__ = _assigned


class _Attribute(_Proxy, fx.proxy.Attribute):
    """What `_Proxy` gives for ``x.dtype``, and calls for ``x.dim()``."""


def _is_asked_by_a_user(frame: FrameType) -> bool:
    return not is_trusted(frame.f_code) and not _is_of_python(frame.f_code)


@cache
def _is_of_a_layer(code: CodeType) -> bool:
    return code.co_filename.startswith(_OF_LAYERS) and code.co_filename != _OF_MODULE


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
        reader = sys._getframe(1).f_code
        own = type(self)._relu2ir_own
        if is_trusted(reader) and not (own and _is_of_a_layer(reader)):
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
        # A class method, or a getter in C, reads state that nobody watches.
        method = isinstance(getattr(found, "fget", found), FunctionType | staticmethod)
        of_torch = hasattr(nn.Module, name) and name != "forward"
        if name in state or of_torch or not method or not own:
            raise ModeDependent(f"reads self.{name}, which may change")
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not is_trusted(sys._getframe(1).f_code):
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
def _watching(kind: type[nn.Module]) -> Iterator[None]:
    """For the time of the block, judge the forward of ``kind`` and all that it calls before a line of it runs."""
    judged: set[CodeType] = set()
    entry = _place(kind.forward.__code__)

    def enter(frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code in _COUNTED:
            raise ModeDependent("reads the members of an nn.Sequential, which may change")
        if event != "call" or code in judged or is_trusted(code):
            return
        if _place(code) == entry or _is_users(frame, judged):
            closed_over = {name: frame.f_locals.get(name) for name in code.co_freevars if name != "__class__"}
            for name, value in closed_over.items():
                judge_value(name, value)
            judge(code, frame.f_globals, judged, kind)

    before = sys.getprofile()
    sys.setprofile(enter)
    try:
        yield
    finally:
        sys.setprofile(before)
