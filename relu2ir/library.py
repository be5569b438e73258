"""The ops in torch: schema, composite body, vmap rule, the op of each provider, their functions in `ops`.

The public op ``relu2ir::relu_squared`` is CompositeImplicitAutograd: it stays one node in Dynamo and torch.export
graphs, and opens into plain PyTorch under AOTAutograd, so Inductor fuses it with its neighbours and every transform
works with nothing more registered. ``relu2ir_cuda::relu_squared`` is the same op by one provider, strictly;
``relu2ir_cuda::relu_squared.or_native`` leaves to plain PyTorch what that provider cannot run.
"""

from __future__ import annotations

import copyreg
import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from types import BuiltinFunctionType, ModuleType
from typing import Any

import torch

from relu2ir import overrides, saving
from relu2ir.eager import forget, run, run_with
from relu2ir.errors import OpError, Problem, ProviderError, SpecError, listed, suggestion
from relu2ir.front import front
from relu2ir.guards import EXACT
from relu2ir.layout import shape_problem, whole_shape
from relu2ir.overrides import EVERY_OP
from relu2ir.registry import PROVIDERS, Imagined, explain, provider, refusal, requested
from relu2ir.spec import Layout, OpSpec
from relu2ir.specfile import DEFAULT_NAMESPACE, SpecFile

ops = ModuleType("relu2ir.ops")
"""Every registered op as a function: ``ops.relu_squared``, and ``ops.mine.double_relu`` of another namespace.

These are modules, so that the functions can be imported, and pickled by name.
"""
sys.modules[ops.__name__] = ops

# The overload of an op that keeps its result for the backward.
SAVING_OUTPUT = "saving_output"

_specs: dict[str, OpSpec] = {}
_module_of: dict[Any, str] = {}


def specs() -> list[OpSpec]:
    """Every registered op spec, in the order of registration."""
    return list(_specs.values())


def find(name: str) -> OpSpec:
    """The spec of ``relu_squared`` or ``mine::double_relu``; OpError with the valid names otherwise.

    A bare name means the library's own op first, then the only other of that name.
    """
    qualname = name if "::" in name else f"{DEFAULT_NAMESPACE}::{name}"
    if qualname in _specs:
        return _specs[qualname]
    matches = [spec for spec in specs() if spec.name == name]
    if len(matches) == 1:
        return matches[0]
    if matches:
        several = listed(spec.qualname for spec in matches)
        raise OpError(f"'{name}' is declared in several namespaces; choose one of {several}")
    raise OpError(f"unknown op '{name}'{suggestion(name, [spec.name for spec in specs()] + list(_specs))}")


def check_request(op: str, providers: Iterable[str], asked: str) -> None:
    """OpError or ProviderError if a request (``asked`` in these words) is for an op or a provider that does not exist.

    A misspelt op would otherwise be no request at all.
    """
    check_op(op, providers, asked)
    for name in providers:
        provider(name, asked)


def check_op(op: str, _: Iterable[str], asked: str) -> None:
    """OpError if a request is for an op that does not exist."""
    names = [name for spec in specs() for name in (spec.name, spec.qualname)]
    if op != EVERY_OP and op not in names:
        raise OpError(f"unknown op '{op}' in {asked}{suggestion(op, names)}")


def function(name: str) -> Callable[..., Any]:
    """The function of an op in `ops`, by its name."""
    spec = find(name)
    return getattr(_module(spec.namespace), spec.name)


def register(file: SpecFile) -> list[OpSpec]:
    """Make the ops of ``file`` callable; SpecError, with nothing registered, if another definition has a name.

    In `ops` the library's own ops stand beside the other namespaces, so these share no name either.
    """
    new = []
    for spec in file.ops:
        if spec.namespace != DEFAULT_NAMESPACE and f"{DEFAULT_NAMESPACE}::{spec.namespace}" in _specs:
            message = f"'{spec.namespace}' cannot name a namespace: relu2ir has an op of that name; choose another"
            raise SpecError([Problem(file.path, 0, 0, message, "$.namespace")])
        if spec.namespace == DEFAULT_NAMESPACE and spec.name in {other.namespace for other in specs()}:
            message = f"'{spec.name}' cannot name an op of relu2ir: a namespace has that name; choose another"
            raise SpecError([Problem(file.path, 0, 0, message, f"$.ops.{spec.name}")])
        known = _specs.get(spec.qualname)
        if known is None:
            new.append(spec)
        elif (known.hash, known.save) != (spec.hash, spec.save):
            message = (
                f"op '{spec.qualname}' is already declared in {known.file} as {known.formula}; "
                "choose another name or 'namespace'"
            )
            raise SpecError([Problem(file.path, 0, 0, message, f"$.ops.{spec.name}")])
    for spec in new:
        _register(spec)
    forget()
    return new


def _register(spec: OpSpec) -> None:
    _specs[spec.qualname] = spec
    for op in filter(None, (spec, spec.in_place)):
        _define(op, spec.namespace, "", run)
        for each in PROVIDERS.values():  # now: a saved program that holds one is loaded by a process that asks for none
            if not each.plain:
                _define_inner(op, each.name)
    traced = _traced_front(spec)
    function = front(spec, _python_front(spec, traced), traced)
    setattr(_module(spec.namespace), spec.name, function)
    if spec.in_place is not None:
        in_place = _python_front(spec.in_place, _traced_front(spec.in_place))
        setattr(_module(spec.namespace), spec.in_place.name, in_place)
    if isinstance(function, BuiltinFunctionType):  # pickled as an attribute of its state, a capsule
        _module_of[function.__self__] = _module(spec.namespace).__name__
        copyreg.pickle(type(function.__self__), _reduce_state)


def _define(spec: OpSpec, namespace: str, overload: str, run: Callable[..., Any]) -> None:
    """The op ``namespace::name.overload``, whose composite body is ``run``; and its twin that saves the result."""

    def define(overload: str, **how: Any) -> None:
        def body(*args: Any, **kwargs: Any) -> Any:
            return run(spec, *bind(spec, args, kwargs), **how)

        def native(*args: Any, **kwargs: Any) -> Any:
            tensors, params = bind(spec, args, kwargs)
            if spec.writes_input and spec.forward is not None:
                return tensors[0].copy_(provider("native", "").lower(spec.forward)(tensors[0].clone(), *params))
            return provider("native", "").lower(spec)(*tensors, *params)

        name = f"{spec.name}.{overload}" if overload else spec.name
        library = _library(namespace)
        library.define(f"{name}{spec.schema.removeprefix(spec.name)}", tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, body, "CompositeImplicitAutograd")
        # Without a rule of its own vmap loops over the batch, and only a C++ warning tells.
        library.impl(name, native, "FuncTorchBatchedDecomposition")

    define(overload)
    if spec.grad_from_output and not spec.writes_input:
        define(f"{overload}_{SAVING_OUTPUT}" if overload else SAVING_OUTPUT, save="output")


def _reduce_state(state: Any) -> tuple[Any, ...]:
    """A builtin's state as the module where the builtin is; TypeError for a capsule of someone else, as without us."""
    if state not in _module_of:
        raise TypeError(f"cannot pickle '{type(state).__name__}' object")
    return importlib.import_module, (_module_of[state],)


def _module(namespace: str) -> ModuleType:
    """Where the functions of a namespace are: `ops`, or a module in it."""
    if namespace == DEFAULT_NAMESPACE:
        return ops
    if not hasattr(ops, namespace):
        module = ModuleType(f"{ops.__name__}.{namespace}")
        setattr(ops, namespace, module)
        sys.modules[module.__name__] = module
    return getattr(ops, namespace)


def bind(spec: OpSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[torch.Tensor, ...], list[float]]:
    """A call's arguments as the op's tensors in order and its params with their defaults."""
    names = [input.name for input in spec.inputs]
    tensors = [*args, *(kwargs.pop(name) for name in names[len(args) :] if name in kwargs)]
    unknown = [name for name in kwargs if name not in spec.params]
    if unknown or len(tensors) != len(names):
        found = [*(f"{len(args)} positional" for _ in args[:1]), *kwargs]
        raise TypeError(f"{spec.name} takes ({spec.arguments}); found {', '.join(found) or 'nothing'}")
    for name, tensor in zip(names, tensors, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{spec.name} takes '{name}' as a tensor; found {type(tensor).__name__}. Pass a tensor.")
    check_contract(spec, tensors)
    return tuple(tensors), [float(kwargs.get(name, default)) for name, default in spec.params.items()]


def check_contract(spec: OpSpec, tensors: Sequence[torch.Tensor]) -> None:
    """ValueError for operands that no provider could take: see `shape_problem`."""
    if all(input.layout is Layout.plain for input in spec.inputs):
        return  # a nested tensor has no shape to ask for
    problem = shape_problem(spec, [tensor.shape for tensor in tensors])
    if problem is not None:
        raise ValueError(f"{spec.qualname} {problem}")


def _python_front(spec: OpSpec, traced: Callable[..., Any]) -> Callable[..., Any]:
    """The function of ``spec`` in `ops`, in Python: the whole rule."""

    def call(*args: Any, provider: str | None = None, save: str | None = None, **kwargs: Any) -> Any:
        # A proxy of symbolic_trace, a tensor subclass: its own __torch_function__ sees the op.
        sees = any(type(arg) not in EXACT and hasattr(arg, "__torch_function__") for arg in args)
        if sees or torch.compiler.is_compiling():
            return traced(*args, provider=provider, save=save, **kwargs)
        tensors, params = bind(spec, args, kwargs)
        return run(spec, tensors, params, provider, save)

    call.__name__ = call.__qualname__ = spec.name
    call.__module__ = _module(spec.namespace).__name__
    where = ", into its input" if spec.writes_input else ""
    call.__doc__ = f"{spec.doc}\n\n{spec.formula}, elementwise over ({spec.arguments}){where}."
    return call


def _traced_front(spec: OpSpec) -> Callable[..., Any]:
    """What Dynamo traces for the function of ``spec``. It closes over text only, which Dynamo can hold."""
    namespace, name, qualname = spec.namespace, spec.name, (spec.forward or spec).qualname
    names = tuple(input.name for input in spec.inputs)

    def traced(*args: Any, provider: str | None = None, save: str | None = None, **kwargs: Any) -> Any:
        # One node in the graph, and a guard on the overrides: compiled code does not outlive them.
        where, overload = namespace, "default"
        if provider is not None or save is not None or overrides.active_key != "":
            operands = [*args, *(kwargs[name] for name in names if name in kwargs)]
            tensors = [operand for operand in operands if isinstance(operand, torch.Tensor)]
            kinds = tuple((tensor.dtype, tensor.device, tensor.dim()) for tensor in tensors)
            exact = all(type(tensor) in EXACT for tensor in tensors)
            where, overload = _asked_op(qualname, provider, save, kinds, exact).split(".")
        return getattr(getattr(getattr(torch.ops, where), name), overload)(*args, **kwargs)

    return traced


def inner_op(spec: OpSpec, name: str, strict: bool = True) -> Any:
    """The op of one provider in a graph, ``torch.ops.relu2ir_cuda.relu_squared.default``; for native the public op.

    Not ``strict`` it is ``.or_native``, which runs in PyTorch what that provider cannot run.
    """
    if provider(name, f"inner_op({spec.name!r}, {name!r})").plain:
        return getattr(getattr(torch.ops, spec.namespace), spec.name).default
    _define_inner(spec, name)
    packet = getattr(getattr(torch.ops, f"{spec.namespace}_{name}"), spec.name)
    return packet.default if strict else packet.or_native


def _asked_op(qualname: str, providers: str | None, save: str | None, kinds: tuple[Any, ...], exact: bool) -> str:
    """``namespace.overload`` of the op that a graph gets under a request, of which ``kinds`` are the operands'.

    These are the (dtype, device, rank) of each, none where tracing knows no tensors.
    """
    spec = find(qualname)
    names, source = requested(spec, providers)
    # For operands that are not exact the public op, if the list allows plain PyTorch: only that can run inside a tensor
    # subclass. With a platform only, it chooses when the graph runs.
    plain = names is None or ("native" in names and not exact)
    chosen = "native" if plain or names is None else _asked_provider(spec, names, source, providers, kinds)
    loose = chosen != "native" and names is not None and "native" in names
    parts = ["or_native"] if loose else []
    to_save, _ = saving.requested(spec, save)
    dtype = kinds[0][0] if kinds else torch.get_default_dtype()
    if to_save is not None and saving.saved(spec, dtype, save) == "output":
        parts.append(SAVING_OUTPUT)
    return f"{inner_op(spec, chosen).namespace}.{'_'.join(parts) or 'default'}"


def _asked_provider(
    spec: OpSpec, names: Sequence[str], source: str, providers: str | None, kinds: tuple[Any, ...]
) -> str:
    """The first provider of the list that takes such operands here."""
    if kinds:
        # Of sizes only the rank is a constant to Dynamo; whatever they are, the contract is checked beside the graph.
        tensors = [
            Imagined(whole_shape(input.layout, (2,) * rank), dtype, device)
            for input, (dtype, device, rank) in zip(spec.inputs, kinds)
        ]
        explanation = explain(spec, *tensors, providers=providers)
        if explanation.chosen is None:
            raise ProviderError(refusal(explanation))
        return explanation.chosen
    missing = {name: provider(name, source).missing() for name in names}
    for name, reason in missing.items():
        if reason is None:
            return name
    reasons = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
    raise ProviderError(
        f"{spec.qualname} cannot be compiled for {source}: {reasons}. Drop the request or end it with 'native'."
    )


# torch.compiler.assume_constant_result, without its import of Dynamo and sympy (1.7 s).
_asked_op._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _define_inner(spec: OpSpec, name: str) -> None:
    for overload, strict in (("", True), ("or_native", False)):
        _define(spec, f"{spec.namespace}_{name}", overload, partial(_run_with, name, strict))


def _run_with(name: str, strict: bool, spec: OpSpec, tensors: Any, params: Any, save: str | None = None) -> Any:
    return run_with(spec, name, strict, tensors, params, save)


@cache
def _library(namespace: str) -> torch.library.Library:
    return torch.library.Library(namespace, "FRAGMENT")
