"""Write the GELU that is approximated by a tanh as products and that tanh.

XNNPACK's GELU is the exact one, and executorch hands both kinds to it alike: the approximation, which Gemma and others
are trained with, would differ by up to 5e-4 a value. Here it is computed as its definition says
(https://arxiv.org/abs/1606.08415, section 2), equal up to rounding.
"""

from __future__ import annotations

import math

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

_ATEN = torch.ops.aten
_CUBIC = 0.044715


def gelu_tanh_as_products(program: ExportedProgram) -> ExportedProgram:
    """Replace every ``gelu(x, approximate="tanh")``; the exact kind stays."""
    graph = program.graph_module.graph
    for node in graph.find_nodes(op="call_function", target=_ATEN.gelu.default):
        if node.kwargs.get("approximate", "none") != "tanh":
            continue
        with graph.inserting_before(node):
            node.replace_all_uses_with(_products(graph, node))
        graph.erase_node(node)
    program.graph_module.recompile()
    return program


def _products(graph: Graph, gelu: Node) -> Node:
    """``0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))``; every node of it has the shape of ``gelu``."""

    def call(target: torch._ops.OpOverload, *args: Node | float) -> Node:
        node = graph.call_function(target, args)
        node.meta = dict(gelu.meta)
        return node

    x = gelu.args[0]
    factor = call(_ATEN.add.Tensor, call(_ATEN.mul.Tensor, call(_ATEN.mul.Tensor, x, x), _CUBIC), 1.0)
    inner = call(_ATEN.mul.Tensor, call(_ATEN.mul.Tensor, x, factor), math.sqrt(2 / math.pi))
    return call(
        _ATEN.mul.Tensor, call(_ATEN.mul.Tensor, x, 0.5), call(_ATEN.add.Tensor, call(_ATEN.tanh.default, inner), 1.0)
    )
