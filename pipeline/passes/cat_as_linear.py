"""Write concatenations of parts of one tensor along its last axis as matrix products.

XNNPACK takes neither a slice of a tensor with a dynamic axis nor a concatenation of a tensor with itself. A product
with a matrix of zeros, ones and minus ones gives the same values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from pipeline.passes.constants import add_constant

Product: TypeAlias = tuple[Node, str, torch.Tensor]
"""The tensor ``[..., W]`` that is concatenated, and the name and values of the weight ``[V, W]`` that does the same."""


def cat_as_linear(program: ExportedProgram, product_of: Callable[[Node], Product | None]) -> ExportedProgram:
    """Replace each concatenation for which ``product_of`` gives a product; None: it stays."""
    graph = program.graph_module.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default):
        found = product_of(node)
        if found is None:
            continue
        source, name, values = found
        weight = add_constant(program, name, values)
        with graph.inserting_before(node):
            product = graph.call_function(torch.ops.aten.linear.default, (source, weight))
        product.meta = dict(node.meta)
        node.replace_all_uses_with(product)
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program
