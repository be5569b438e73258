"""An ExportedProgram with its graph edited; torch verifies the whole."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx
from torch.export import ExportedProgram


def edited(program: ExportedProgram, edit: Callable[[fx.GraphModule], fx.GraphModule]) -> ExportedProgram:
    """A program whose graph module is ``edit`` of the one of ``program``, which is left as it is.

    ``edit`` returns a new graph module that takes and returns the same values in the same order. A new node takes the
    name of the old one that it replaces: the signature and the module call graph go by names.
    """
    module = edit(program.graph_module)
    _take_names(program.graph, module.graph)
    return ExportedProgram(
        root=module,
        graph=module.graph,
        graph_signature=program.graph_signature,
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=program.verifiers,
    )


def _take_names(old: fx.Graph, new: fx.Graph) -> None:
    """Give a new node the name of the one whose recorded value it took over."""
    names, kept = {node.name for node in new.nodes}, {node.name for node in old.nodes}
    gone = {id(node.meta["val"]): node.name for node in old.nodes if node.name not in names and "val" in node.meta}
    for node in new.nodes:
        if node.name not in kept and id(node.meta.get("val")) in gone:
            node.name = gone.pop(id(node.meta["val"]))
