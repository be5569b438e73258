"""`lower`: each op of a graph becomes what its chosen provider runs, visible when the graph is printed.

``native`` becomes the op's plain PyTorch calls, the exact inverse of `fuse`; any other provider its own op, which is
differentiable: ``torch.ops.relu2ir_cuda.relu_squared.or_native``, or ``.default``, which is strict, where that provider
was asked for without ``native``. Several providers accept a call by its device, dtype and shape, so each op node needs
a fake value: of the capture, or of a run over fake copies of example inputs.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import fx, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.fx.proxy import GraphAppendingTracer

from relu2ir import eager, library
from relu2ir.errors import FuseError, ProviderError
from relu2ir.fx.packing import value_of
from relu2ir.fx.program import edited
from relu2ir.fx.structure import copy_structure, relink
from relu2ir.registry import explain, provider, refusal, requested
from relu2ir.spec import OpSpec

# How a graph is written: as torch's functions, as an exported program's aten ops, or as Inductor's decomposed ones.
Level: TypeAlias = Literal["torch", "export", "post_grad"]


def lower(
    graph_module: Any,
    *example_inputs: Any,
    providers: str | None = None,
    platform: str | None = None,
    there: bool = False,
) -> Any:
    """A copy of ``graph_module``, or of an ExportedProgram, in which every op node calls what the registry chooses.

    ``providers`` and ``platform`` ask as they do for a call; ``there`` shows what a machine of that platform would
    choose, whatever is missing on this one. Raises FuseError where an op's operands are not known (give example
    inputs), and ProviderError where a provider that was asked for by name cannot run.
    """
    if isinstance(graph_module, ExportedProgram):
        return edited(graph_module, lambda module: _lowered(module, providers, platform, there, "export"))
    if not isinstance(graph_module, fx.GraphModule):
        found = type(graph_module).__name__
        raise FuseError(
            f"lower takes a torch.fx.GraphModule or an ExportedProgram; found {found}. Capture the model as a graph "
            "first."
        )
    if example_inputs:
        graph_module = _copy(graph_module)
        _propagate(graph_module, example_inputs)
    return _lowered(graph_module, providers, platform, there)


def _propagate(graph_module: fx.GraphModule, example_inputs: tuple[Any, ...]) -> None:
    """Give every node a fake value, those of graph modules below too: each records its values whenever it is called."""

    def record(below: fx.GraphModule, mode: FakeTensorMode) -> None:
        signature = inspect.signature(below.forward)

        def forward(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return FakeTensorProp(below, mode).run(*bound.args)

        below.forward = forward

    graph_modules = [module for module in graph_module.modules() if isinstance(module, fx.GraphModule)]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        for below in graph_modules[1:]:
            record(below, mode)
        FakeTensorProp(graph_module, mode).propagate(*example_inputs)
    for below in graph_modules[1:]:
        del below.forward


def _lowered(
    graph_module: fx.GraphModule, providers: str | None, platform: str | None, there: bool, level: Level = "torch"
) -> Any:
    new = _copy(graph_module)
    for module in new.modules():
        if isinstance(module, fx.GraphModule):
            lower_in_place(module.graph, providers, platform, there, level)
            module.recompile()
    return new


def lower_in_place(
    graph: fx.Graph,
    providers: str | None = None,
    platform: str | None = None,
    there: bool = False,
    level: Level = "torch",
) -> None:
    """Lower the ops of one graph, which is written at ``level``.

    After autograd (``post_grad``) nothing opens the op of a provider any more: its kernel is called, which records no
    gradient.
    """
    by_op = {getattr(getattr(torch.ops, s.namespace), s.name).default: s for s in library.specs()}
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in by_op:
            _lower(node, by_op[node.target], providers, platform, there, level)


def _copy(graph_module: fx.GraphModule) -> Any:
    copies: dict[int, nn.Module] = {}
    new = _copied(graph_module, copies)
    relink(copies)
    return new


def _copied(module: nn.Module, copies: dict[int, nn.Module]) -> Any:
    """A copy of the graph modules of a tree; other modules, which hold no graph to lower, are shared."""
    if not any(isinstance(below, fx.GraphModule) for below in module.modules()):
        return module
    if id(module) not in copies:
        children = {name: None if child is None else _copied(child, copies) for name, child in module._modules.items()}
        copies[id(module)] = copy_structure(module, children)
    return copies[id(module)]


def _lower(node: fx.Node, spec: OpSpec, providers: str | None, platform: str | None, there: bool, level: Level) -> None:
    operands = [*node.args, *(node.kwargs[input.name] for input in spec.inputs[len(node.args) :])]
    values = [value_of(operand) for operand in operands if isinstance(operand, fx.Node)]
    if len(values) != len(spec.inputs) or not all(isinstance(value, torch.Tensor) for value in values):
        raise FuseError(
            f"lower cannot choose a provider for '{node.name}' ({spec.qualname}): its operands are not known in this "
            "graph. Give example inputs, lower(graph_module, x), or capture with torch.compile or torch.export."
        )
    explanation = explain(spec, *values, providers=providers, platform=platform)
    name = explanation.there if there else explanation.chosen
    if name is None:
        raise ProviderError(refusal(explanation))
    chosen, params = provider(name, explanation.source), [node.kwargs.get(p, d) for p, d in spec.params.items()]
    if not chosen.plain and level == "post_grad":
        node.target, node.args, node.kwargs = eager.opaque(spec, chosen), (*operands, *params), {}
        node.meta |= {"val": node.target(*values, *params), "eager_input_vals": ((*values, *params), {})}
        return
    if not chosen.plain:
        asked, _ = requested(spec, providers)
        node.target = library.inner_op(spec, name, strict=asked is not None and "native" not in asked)
        return
    native = chosen.lower(spec)
    if level == "torch":
        result = _written_in_torch(node, operands, native, params)
    else:
        result = _written_in_aten(node, operands, native, params, level)
    result.meta = copy.copy(node.meta)
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)


def _written_in_torch(node: fx.Node, operands: list[Any], native: Callable[..., Any], params: list[Any]) -> fx.Node:
    tracer = GraphAppendingTracer(node.graph)
    with node.graph.inserting_before(node):
        return native(*(fx.Proxy(operand, tracer) for operand in operands), *params).node


def _written_in_aten(
    node: fx.Node, operands: list[Any], native: Callable[..., Any], params: list[Any], level: Level
) -> fx.Node:
    values = [_outside_transforms(value_of(operand)) for operand in operands]
    after = level == "post_grad"
    how = {"decomposition_table": _inductors_decompositions()} if after else {"pre_dispatch": True}
    traced = make_fx(lambda *tensors: native(*tensors, *params), **how)(*values).graph
    *body, output = traced.nodes
    given = iter(operands)
    new: dict[fx.Node, Any] = {each: next(given) for each in body if each.op == "placeholder"}
    with node.graph.inserting_before(node):
        for each in body:
            if each.op != "placeholder":
                new[each] = node.graph.node_copy(each, new.__getitem__)
                new[each].meta = node.meta | {"val": each.meta["val"]}
    return new[output.args[0]]


def _outside_transforms(value: torch.Tensor) -> torch.Tensor:
    """``value``, or a fake tensor that looks like it where it is one of a vmap, which is over by now."""
    inner = value
    while torch._C._functorch.is_functorch_wrapped_tensor(inner):
        inner = torch._C._functorch.get_unwrapped(inner)
    if inner is value:
        return value
    assert isinstance(inner, FakeTensor)
    with inner.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _inductors_decompositions() -> dict[Any, Callable[..., Any]]:
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()
