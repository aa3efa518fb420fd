"""Write a mean over the last axis as a matrix product with a row of 1/N.

XNNPACK takes no ``mean`` over the last axis of a 3-D tensor, so each RMSNorm would split the graph in two. The product
has the same value up to rounding: the order of summation, and 1/N before the sum instead of after it.
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from pipeline.passes.constants import add_constant


def mean_as_linear(program: ExportedProgram) -> ExportedProgram:
    """Replace every ``mean(x, [-1], keepdim=True)`` of a float tensor whose last axis has a fixed size N."""
    graph = program.graph_module.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mean.dim):
        if not _is_last_axis_mean(node):
            continue
        value = node.args[0].meta["val"]
        width = int(value.shape[-1])
        row = add_constant(program, f"mean_row_{width}", torch.full((1, width), 1.0 / width, dtype=value.dtype))
        with graph.inserting_before(node):
            product = graph.call_function(torch.ops.aten.linear.default, (node.args[0], row))
        product.meta = dict(node.meta)
        node.replace_all_uses_with(product)
        graph.erase_node(node)
    program.graph_module.recompile()
    return program


def _is_last_axis_mean(node: Node) -> bool:
    value, dims = node.args[0].meta["val"], node.args[1]
    keepdim = len(node.args) > 2 and node.args[2]
    last = dims is not None and list(dims) in ([-1], [value.dim() - 1])  # None: over all axes
    return bool(
        last and keepdim and value.dtype == torch.float32 and isinstance(value.shape[-1], int) and not node.kwargs
    )
