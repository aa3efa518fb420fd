"""Compute what depends on no input of a program when the program is made.

A model's forward computes positions, indices and masks from sizes. Where those are fixed the results are too; and some
of the operators that it takes, such as ``bucketize``, have no kernel on a device.
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from pipeline.passes.constants import add_constant
from pipeline.passes.purity import is_pure


def fold_constants(program: ExportedProgram) -> ExportedProgram:
    """Replace each value that is made of numbers alone, not of inputs or weights, by a constant tensor.

    A value that one operator makes of nothing, such as ``full`` or ``arange``, stays: its kernel is in every runtime,
    and the file would hold it whole.
    """
    graph = program.graph_module.graph
    values = _computed(program)
    folded = [node for node in values if isinstance(values[node], torch.Tensor) and _is_last(node, values)]
    for number, node in enumerate(folded):
        node.replace_all_uses_with(add_constant(program, f"folded_{number}", values[node].contiguous()))
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program


def _computed(program: ExportedProgram) -> dict[Node, torch.Tensor]:
    """Each node that depends on no input and no weight -> its value."""
    specs = program.graph_signature.input_specs
    lifted = {s.arg.name: program.constants[s.target] for s in specs if s.kind is InputKind.CONSTANT_TENSOR}
    values: dict[Node, torch.Tensor] = {}
    for node in program.graph_module.graph.nodes:
        if node.op == "placeholder" and node.name in lifted:
            values[node] = lifted[node.name]
        elif is_pure(node) and all(each in values for each in node.all_input_nodes):
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    return values


def _is_last(node: Node, values: dict[Node, torch.Tensor]) -> bool:
    """Whether what reads the value is computed when the program runs, and making it takes more than one operator."""
    return bool(node.all_input_nodes) and any(user not in values for user in node.users)
