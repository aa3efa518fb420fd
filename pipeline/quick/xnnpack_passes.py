"""Skip, for each XNNPACK delegate, the passes that have nothing to change in it.

XNNPACK's ``preprocess`` runs 17 passes over every delegate, and nearly all of them interpret the whole graph anew even
when they find nothing to do. The table below names what a pass must see in a graph before it can change it (read from
the passes of executorch 1.5.1). A pass without a row, such as one that a later version adds, always runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from executorch.backends.transforms.remove_getitem_op import RemoveGetItemPass
from executorch.backends.xnnpack import _passes as stock
from executorch.backends.xnnpack import xnnpack_preprocess
from executorch.exir.dialects._ops import ops as exir_ops
from executorch.exir.passes.const_prop_pass import ConstPropPass
from executorch.exir.passes.memory_format_ops_pass import DimOrderOpsRevertPass
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from pipeline.substitution import replaced

Trigger = Callable[[Graph], bool]
"""Whether a pass may change this graph. True when in doubt."""

_edge = exir_ops.edge
_aten = _edge.aten
_BATCH_NORMS = (_aten.native_batch_norm.default, _aten._native_batch_norm_legit_no_training.default)
_MATRIX_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default)
_CHANNELS_LAST = (*stock.ChannelsLastTaggedReshapePass.memory_sensitive_ops_nhwc, _aten._to_copy.default)


@contextmanager
def only_needed_passes() -> Iterator[None]:
    """Within the scope XNNPACK's ``preprocess`` runs only the passes that can change a delegate's graph."""
    with replaced(xnnpack_preprocess, "XNNPACKPassManager", _OnlyNeeded):
        yield


class _OnlyNeeded(stock.XNNPACKPassManager):  # type: ignore[misc]  # executorch is not type-checked here
    """The stock manager, which asks for each pass when its turn comes: an earlier one may have made work for it."""

    def transform(self) -> ExportedProgram:
        program = self.exported_program
        for each in self.passes:
            if may_change(each, program.graph_module.graph):
                program = stock.XNNPACKPassManager(program, [each]).transform()
        return program


def may_change(pass_type: type, graph: Graph) -> bool:
    """Whether ``pass_type`` has anything to do in ``graph``, a delegate in the edge dialect. True when unknown."""
    trigger = TRIGGERS.get(pass_type)
    return trigger is None or trigger(graph)


def _has(*targets: object) -> Trigger:
    wanted = frozenset(targets)
    return lambda graph: any(node.op == "call_function" and node.target in wanted for node in graph.nodes)


def _has_named(*names: str) -> Trigger:
    wanted = frozenset(names)
    return lambda graph: any(node.op == "call_function" and node.target.__name__ in wanted for node in graph.nodes)


def _can_become_linear(graph: Graph) -> bool:
    """Products become ``linear``, views around a ``linear`` go, and unused nodes go with them."""
    return any(node.op == "call_function" and (_is_product(node) or _is_unused(node)) for node in graph.nodes)


def _is_product(node: Node) -> bool:
    if node.target in _MATRIX_PRODUCTS:
        return True
    beside = (node.args[0], *node.users)
    return node.target == _aten.linear.default and any(other.target == _aten.view_copy.default for other in beside)


def _is_unused(node: Node) -> bool:
    return not node.users


def _has_custom_meta(graph: Graph) -> bool:
    return any("custom" in node.meta for node in graph.nodes)


def _has_constant_operator(graph: Graph) -> bool:
    """An operator that depends on no placeholder and no other operator is computed while lowering."""
    return any(
        node.op == "call_function" and all(source.op == "get_attr" for source in node.all_input_nodes)
        for node in graph.nodes
    )


def _may_hold_channels_last(graph: Graph) -> bool:
    """Only these operators, or a tensor that is not stored in the order of its axes, start a channels-last region."""
    return _has(*_CHANNELS_LAST)(graph) or not all(_is_in_order(node) for node in _edges(graph))


def _edges(graph: Graph) -> list[Node]:
    results = list(graph.output_node().args[0])
    return [node for node in graph.nodes if not node.all_input_nodes and node.op != "output"] + results


def _is_in_order(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_contiguous()


TRIGGERS: dict[type, Trigger] = {
    stock.XNNPACKRemoveCloneOpsTransform: _has(_aten.clone.default, _edge.dim_order_ops._clone_dim_order.default),
    DimOrderOpsRevertPass: lambda graph: any(
        node.op == "call_function" and "dim_order" in node.target.__name__ for node in graph.nodes
    ),
    stock.ConvertToUpsampleBilinear2d: _has(_aten.upsample_bilinear2d.vec),
    stock.ConvertToLinearPass: _can_become_linear,
    stock.PropagateCustomMetaPass: _has_custom_meta,
    stock.ConvertToSDPAPass: _has(_aten._softmax.default),
    ConstPropPass: _has_constant_operator,
    stock.FuseBatchNormPass: _has(*_BATCH_NORMS),
    stock.DecomposeBatchNorm: _has(*_BATCH_NORMS),
    stock.FuseActivationPass: _has(*stock.FuseActivationPass.FUSEABLE_ACTIVATIONS),
    stock.DecomposeConcatenate: _has_named("aten.cat.default"),
    RemoveGetItemPass: _has_named("aten.max_pool2d_with_indices.default", "aten.max.dim"),
    stock.InsertPadQDQPass: _has(_aten.constant_pad_nd.default),
    # It also refreshes the values around what InsertPadQDQPass, which does not interpret the graph itself, put in.
    stock.Conv1dUnsqueezePass: _has(_aten.convolution.default, _aten.constant_pad_nd.default),
    stock.PReLUReshapePass: _has(_aten._prelu_kernel.default),
    stock.ChannelsLastTaggedReshapePass: _may_hold_channels_last,
    stock.RemoveRedundantCopyPass: _has(_aten._to_copy.default),
}
