"""Add a constant tensor to an exported program."""

from __future__ import annotations

import torch
from executorch.backends.transforms.utils import create_constant_placeholder
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node


def add_constant(program: ExportedProgram, name: str, value: torch.Tensor) -> Node:
    """Return the placeholder of the buffer ``name``, added before the other inputs unless it is there already.

    A registered buffer, not a lifted constant: a lifted constant that several delegates share breaks their lowering.
    """
    graph = program.graph_module.graph
    with graph.inserting_before(next(iter(graph.nodes))):
        return create_constant_placeholder(program, graph, name, InputKind.BUFFER, value, persistent_buffer=True)
