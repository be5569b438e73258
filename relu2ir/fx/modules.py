"""Fusing inside nn.Modules: whole activation modules are swapped, other forwards are traced one by one.

A model is never traced as a whole (that fails on real ones). What cannot be traced truthfully is left as it is.
"""

from __future__ import annotations

import copy
import dis
import inspect
import itertools
import linecache
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import fx, nn

from relu2ir.fx.match import Match
from relu2ir.fx.patterns import Pattern
from relu2ir.fx.reading import computed_by, is_altered
from relu2ir.fx.spellings import OTHERS, ROWS
from relu2ir.ir.expr import OPERATORS, Call, postorder
from relu2ir.nn import Activation, layer_for

_MODULE_STATE = vars(nn.Module()).keys()
_PLAIN = frozenset({
    "__init__", "extra_repr", "forward",
    "__module__", "__qualname__", "__doc__", "__annotations__", "__constants__",
    "__firstlineno__", "__static_attributes__", "__annotate_func__", "__annotations_cache__",
})  # fmt: skip
_BINARY_OF_3_10 = {"BINARY_POWER": "**", "BINARY_MULTIPLY": "*"}


def as_layer(module: nn.Module, graph: fx.Graph, matches: list[Match]) -> Activation | None:
    """The layer of an op that ``module`` is: its forward is the op of its arguments, and it holds no tensors.

    What else stands on the module, which its forward does not read (a flag of its library), stands on the layer too.
    """
    if len(matches) != 1 or matches[0].other_square or is_altered(module):
        return None
    (match,) = matches
    *placeholders, op, output = graph.nodes
    given = tuple(node for node in placeholders if node.op == "placeholder" and not node.args)
    if len(given) < len(placeholders) or op.args != given or output.args != (op,) or len(set(given)) < len(given):
        return None
    if module._parameters or module._buffers or module._modules or not _has_only_a_forward(module):
        return None
    layer = layer_for(match.spec)(**match.params)
    others = {name: value for name, value in vars(module).items() if name not in _MODULE_STATE}
    if others.keys() & {*vars(layer), "forward"}:
        return None
    layer.__dict__.update(others)
    return layer.train(module.training)


def _has_only_a_forward(module: nn.Module) -> bool:
    """Whether nobody can miss the class of ``module``, nor its hooks for a state_dict, on the layer of its op."""
    written = (name for kind in type(module).__mro__ if kind not in nn.Module.__mro__ for name in vars(kind))
    return _PLAIN.issuperset(written) and not any(value for name, value in vars(module).items() if "_hooks" in name)


class FusedForward:
    """The forward of one module with its ops raised: ``module.forward``, in place of the one of its class.

    It reads parameters, buffers and children from the module at each call. Where what the graph has absorbed is no
    longer what it was (an nn.ReLU replaced, hooked or patched; a class or a method patched; autocast, around a square
    that the op writes otherwise), the class's own forward runs. A deepcopy belongs to the copied module. A shallow
    copy.copy, of which nn.DataParallel makes its replicas, goes on with the tensors of the module that was copied (no
    attribute can tell who looked it up), until it is fused itself. A pickle holds the class's own forward: generated
    code is not stored, so fuse again after loading.
    """

    def __init__(self, owner: nn.Module, graph: fx.Graph, matches: Iterable[Match]) -> None:
        self.owner = owner
        self.run = _compiled(graph, type(owner).__qualname__)
        covered = [node for match in matches for node in match.covered]
        absorbed = {str(node.target) for node in covered if node.op == "call_module"}
        self.absorbed = {name: _as_set(owner.get_submodule(name)) for name in absorbed}
        self.not_under_autocast = any(match.other_square for match in matches)
        self.kind = type(owner)
        self.functions = tuple(_functions(self.kind))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self.run if self._holds() else type(self.owner).forward
        return run(self.owner, *args, **kwargs)

    def _holds(self) -> bool:
        if not torch.compiler.is_compiling() and not self._is_of_its_class():  # on which Dynamo guards
            return False
        if self.not_under_autocast and torch._C._is_any_autocast_enabled():
            return False
        if self.absorbed and torch.nn.modules.module._has_any_global_hook():
            return False
        children = ((self.owner.get_submodule(name), was) for name, was in self.absorbed.items())
        return all(_as_set(child) == was and not is_altered(child) for child, was in children)

    def _is_of_its_class(self) -> bool:
        """Whether the class, its functions and their defaults are those of the trace, and no instance hides one."""
        own = vars(self.owner)
        return type(self.owner) is self.kind and all(
            vars(kind).get(name) is function
            and (function.__defaults__, function.__kwdefaults__) == defaults
            and (name == "forward" or name not in own)
            for kind, name, function, defaults in self.functions
        )

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(_own_forward_of(self.owner))

    def of(self, owner: nn.Module) -> FusedForward:
        """The same for a copy of the module."""
        new = object.__new__(FusedForward)
        vars(new).update(vars(self) | {"owner": owner})
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedForward:
        return self.of(copy.deepcopy(self.owner, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return _own_forward_of, (self.owner,)


def _as_set(layer: nn.Module) -> tuple[Any, bool]:
    """What an absorbed layer computes as it is set now, and whether in place."""
    return computed_by(layer), getattr(layer, "inplace", False)


def _functions(kind: type) -> Iterator[tuple[type, str, FunctionType, tuple[Any, Any]]]:
    """What a forward of ``kind`` may call of it and the classes above it, apart from torch's, with the defaults."""
    for each in kind.__mro__:
        if not each.__module__.startswith("torch."):
            for name, value in vars(each).items():
                if isinstance(value, FunctionType) and not name.startswith("__"):
                    yield each, name, value, (value.__defaults__, copy.copy(value.__kwdefaults__))


def _own_forward_of(owner: nn.Module) -> MethodType:
    return MethodType(type(owner).forward, owner)


def _compiled(graph: fx.Graph, name: str) -> Callable[..., Any]:
    """The function of ``graph``, of the module and its arguments; tracebacks show its text."""
    code = graph.python_code("self")
    file, scope = f"<relu2ir fused {name} {next(_compilations)}>", dict(code.globals)
    exec(compile(code.src, file, "exec"), scope)
    linecache.cache[file] = (len(code.src), None, code.src.splitlines(keepends=True), file)
    return scope["forward"]


_compilations = itertools.count()


def mentions_an_op(forward: FunctionType, layers: Iterable[nn.Module], patterns: Iterable[Pattern]) -> bool:
    """Whether ``forward``, with ``layers`` to call, has a word for each activation of some op: a guess, for reports."""
    words, symbols = _words(forward.__code__)
    kinds = {type(layer) for layer in layers}

    def mentioned(primitive: str) -> bool:
        rows = [ROWS[primitive], *([OTHERS["pow"]] if primitive == "square" else [])]
        spellings = {name for row in rows for name in (*row.methods, *(f.__name__ for f in row.functions))}
        by_symbol = primitive == "square" and not symbols.isdisjoint(("**", "*"))
        return by_symbol or not words.isdisjoint(spellings) or not kinds.isdisjoint(ROWS[primitive].modules)

    for pattern in (pattern for pattern in patterns if pattern.is_of_declaration):
        primitives = {node.primitive for node in postorder([pattern.expr]) if isinstance(node, Call)}
        telling = primitives - {*OPERATORS, "neg", "where"}
        if telling and all(map(mentioned, telling)):
            return True
    return False


def _words(code: CodeType) -> tuple[set[str], set[str]]:
    words, symbols = set(code.co_names), set()
    for instruction in dis.get_instructions(code):
        if instruction.opname == "BINARY_OP":
            symbols.add(instruction.argrepr)
        elif instruction.opname in _BINARY_OF_3_10:
            symbols.add(_BINARY_OF_3_10[instruction.opname])
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = _words(constant)
            words, symbols = words | inner[0], symbols | inner[1]
    return words, symbols
