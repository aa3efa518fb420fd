"""Write every change of shape as a view whose one dynamic size is inferred.

XNNPACK takes a view with fixed sizes and one that it infers (``-1``), but none whose sizes are symbols, nor a size-1
axis anywhere but last. In a program with a dynamic number of tokens each of these would split the graph: between the
products of a layer's queries and keys and their rotary embedding, for one. Further views come into being when a program
becomes an edge program, around each product of matrices: these are written so there.
"""

from __future__ import annotations

import torch
from executorch.exir.dialects._ops import ops
from executorch.exir.pass_base import ExportedProgramPassBase, ExportedProgramPassResult
from torch.export import ExportedProgram
from torch.fx import Node

_ATEN = torch.ops.aten
_RESHAPES = (
    _ATEN.view.default,
    _ATEN._unsafe_view.default,
    _ATEN.reshape.default,
    _ATEN.unsqueeze.default,
    _ATEN.squeeze.dim,
    _ATEN.squeeze.dims,
)


def inferred_size(program: ExportedProgram) -> ExportedProgram:
    """Replace every reshape of a float tensor to a shape with at most one dynamic size."""
    graph = program.graph_module.graph
    for target in _RESHAPES:
        for node in graph.find_nodes(op="call_function", target=target):
            sizes = _sizes(node)
            if sizes is not None:  # the node keeps its name, by which the signature knows an output
                node.target, node.args, node.kwargs = _ATEN.view.default, (node.args[0], sizes), {}
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program


class InferredViewSize(ExportedProgramPassBase):  # type: ignore[misc]  # executorch is Any to the checker
    """The same of the views of an edge program."""

    def call(self, exported_program: ExportedProgram) -> ExportedProgramPassResult:
        """Change ``exported_program`` in place."""
        graph, changed = exported_program.graph, False
        for node in graph.find_nodes(op="call_function", target=ops.edge.aten.view_copy.default):
            sizes = _sizes(node)
            if sizes is not None and -1 in sizes:
                node.args, changed = (node.args[0], sizes), True
        graph.eliminate_dead_code()
        exported_program.graph_module.recompile()
        return ExportedProgramPassResult(exported_program, changed)


def _sizes(node: Node) -> list[int] | None:
    """The shape with -1 for its dynamic size; None where that leaves the shape open."""
    value = node.meta["val"]
    dynamic = [size for size in value.shape if not isinstance(size, int)]
    if value.dtype != torch.float32 or len(dynamic) > 1 or 0 in value.shape:
        return None
    return [size if isinstance(size, int) else -1 for size in value.shape]
