"""Write ``cat([x, x], -1)``, with which a model makes its rotary tables, as a matrix product.

XNNPACK takes no concatenation of one tensor with itself, so the tables of sines and cosines would wait for it, and the
first layer's queries and keys for them, in a delegate of their own. Every output element of the product is one input
element plus zeros: the values are equal, not only close (finite inputs; the sign of a zero may differ).
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from pipeline.passes.constants import add_constant

_ATEN = torch.ops.aten
_WIDEST = 256  # a head's rotary table is no wider, and the matrix grows with the square of it


def doubled_as_linear(program: ExportedProgram) -> ExportedProgram:
    """Replace every concatenation of a float tensor with itself along its last axis, of a fixed width up to 256."""
    graph = program.graph_module.graph
    for node in graph.find_nodes(op="call_function", target=_ATEN.cat.default):
        source = _doubled(node)
        if source is None:
            continue
        width = int(source.meta["val"].shape[-1])
        identity = torch.eye(width, dtype=torch.float32)
        matrix = add_constant(program, f"doubled_{width}", torch.cat([identity, identity]))
        with graph.inserting_before(node):
            product = graph.call_function(_ATEN.linear.default, (source, matrix))
        product.meta = dict(node.meta)
        node.replace_all_uses_with(product)
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program


def _doubled(node: Node) -> Node | None:
    """The tensor that ``node`` puts beside itself, or None where it does something else."""
    parts, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
    if len(parts) != 2 or parts[0] is not parts[1]:
        return None
    value = parts[0].meta["val"]
    width, is_last = value.shape[-1], dim in (-1, value.dim() - 1)
    is_narrow = isinstance(width, int) and width <= _WIDEST
    return parts[0] if is_last and is_narrow and value.dtype == torch.float32 else None
