"""The most that a tensor of dynamic size can hold, for which memory is planned.

executorch bounds a size by the ranges of the symbols in it: what is cut from a cache of L entries, up to the end of a
call that begins below L and has below L tokens, would get memory for 2 L entries.

A view lies in the memory of what it views, and its size is bounded by itself: were a slice bounded further, the runtime
would find no room for its views. So a slice that has views is left as executorch bounds it.
"""

from __future__ import annotations

import torch
from executorch.exir import memory
from executorch.exir.dialects._ops import ops as exir_ops
from executorch.exir.passes.sym_shape_eval_pass import ConstraintBasedSymShapeEvalPass
from executorch.exir.tensor import contiguous_stride_from_shape
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

_SLICES = (exir_ops.edge.aten.slice_copy.Tensor, torch.ops.aten.slice_copy.Tensor)


class UpperBounds(ConstraintBasedSymShapeEvalPass):  # type: ignore[misc]  # executorch is Any to the checker
    """executorch's own pass; besides, a slice without views is no longer than what it is cut from."""

    def call(self, graph_module: GraphModule) -> PassResult:
        """Replace each symbolic size in the specifications of a program's and its branches' tensors by its most."""
        result = super().call(graph_module)
        for module in graph_module.modules():
            if not isinstance(module, GraphModule):
                continue
            for node in module.graph.nodes:
                if node.target in _SLICES and not _has_views(node):
                    spec, whole = node.meta["spec"], node.args[0].meta["spec"]
                    spec.shape = [min(pair) for pair in zip(spec.shape, whole.shape, strict=True)]
                    spec.stride = contiguous_stride_from_shape(torch.Size(spec.shape))
        return result


def _has_views(node: Node) -> bool:
    return any(user.target is memory.view for user in node.users)
