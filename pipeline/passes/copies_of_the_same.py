"""Drop the copies that change nothing: a tensor expanded to the shape it has, or a slice of the whole axis.

A product of matrices is lowered to one of batches, with both sides expanded first, also where they agree already.
XNNPACK takes no ``expand_copy``: each would split the graph, and copy a whole cache at each step. They come into being
only when a program becomes an edge program, so that this pass is for that dialect.
"""

from __future__ import annotations

import torch
from executorch.exir.dialects._ops import ops
from executorch.exir.pass_base import ExportedProgramPassBase, ExportedProgramPassResult
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

_ATEN = ops.edge.aten
_VIEW = _ATEN.view_copy.default
# Each gives elements of its first argument in their order, or repeats some: where the shape stays, so does everything.
_COPIES = (
    _ATEN.expand_copy.default,
    _VIEW,
    _ATEN.slice_copy.Tensor,
    _ATEN.repeat.default,
    _ATEN.clone.default,
    _ATEN.alias_copy.default,
    _ATEN._to_copy.default,
    ops.edge.dim_order_ops._clone_dim_order.default,
    ops.edge.dim_order_ops._to_dim_order_copy.default,
)
_PERMUTE = _ATEN.permute_copy.default


class CopiesOfTheSame(ExportedProgramPassBase):  # type: ignore[misc]  # executorch is Any to the checker
    """Let what reads such a copy read what was copied.

    A copy that the program returns, or that keeps what a mutable buffer held before the program writes it, stays, also
    where it is one of a view of that buffer: the runtime may write the buffer before the copy is read.
    """

    def call(self, exported_program: ExportedProgram) -> ExportedProgramPassResult:
        """Drop them from ``exported_program``, in place."""
        graph, before = exported_program.graph, len(exported_program.graph.nodes)
        written = _written(exported_program)
        for target in (*_COPIES, _PERMUTE):
            for node in graph.find_nodes(op="call_function", target=target):
                if _changes_nothing(node) and not _is_needed(node, written):
                    node.replace_all_uses_with(node.args[0])
                    graph.erase_node(node)
        graph.eliminate_dead_code()
        exported_program.graph_module.recompile()
        return ExportedProgramPassResult(exported_program, len(graph.nodes) != before)


def _written(program: ExportedProgram) -> set[str]:
    """Names of the placeholders that the program writes."""
    signature = program.graph_signature
    mutated = {*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()}
    return {spec.arg.name for spec in signature.input_specs if spec.target in mutated or spec.arg.name in mutated}


def _is_needed(node: Node, written: set[str]) -> bool:
    source = node.args[0]
    while source.op == "call_function" and source.target is _VIEW:  # executorch makes these aliases later
        source = source.args[0]
    return any(user.op == "output" for user in node.users) or source.name in written


def _changes_nothing(node: Node) -> bool:
    source, copy = node.args[0].meta["val"], node.meta["val"]
    if node.target is _PERMUTE and [axis % source.dim() for axis in node.args[1]] != list(range(source.dim())):
        return False
    if (source.dtype, source.device, source.layout) != (copy.dtype, copy.device, copy.layout):
        return False
    return source.dim() == copy.dim() and _equal(source.shape, copy.shape) and _lie_alike(source, copy)


def _lie_alike(source: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether elements lie in the same order in memory; the stride of an axis with one element says nothing."""
    places = [axis for axis, size in enumerate(source.shape) if not statically_known_true(size == 1)]
    return _equal([source.stride(i) for i in places], [copy.stride(i) for i in places])


def _equal(sizes: torch.Size | list[int], others: torch.Size | list[int]) -> bool:
    """Whether sizes, some of which are symbols, are the same whatever the symbols stand for."""
    return all(statically_known_true(a == b) for a, b in zip(sizes, others, strict=True))
