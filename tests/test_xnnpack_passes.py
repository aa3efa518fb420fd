"""Which of XNNPACK's passes are asked for on a delegate."""

from __future__ import annotations

import pytest
import torch
from executorch.backends.xnnpack._passes import (
    ChannelsLastTaggedReshapePass,
    ConvertToLinearPass,
    ConvertToSDPAPass,
    ConvertToUpsampleBilinear2d,
    PropagateCustomMetaPass,
    XNNPACKPassManager,
)
from executorch.backends.xnnpack.partition.graphs import bilinear_2d, sdpa
from executorch.exir.dialects._ops import ops
from executorch.exir.pass_base import ExportPass
from executorch.exir.passes.const_prop_pass import ConstPropPass
from torch.fx import Graph

from pipeline.quick.xnnpack_passes import TRIGGERS, may_change

ATEN = ops.edge.aten
STOCK = XNNPACKPassManager(None).passes


def _linear_graph(first=None, shape: tuple[int, ...] = (2, 8)) -> Graph:
    """``linear`` of ``first`` of the input, or of the input itself."""
    graph = Graph()
    value, weight = graph.placeholder("x"), graph.placeholder("weight")
    value.meta["val"], weight.meta["val"] = torch.zeros(shape), torch.zeros(4, shape[-1])
    source = graph.call_function(first, (value,)) if first else value
    linear = graph.call_function(ATEN.linear.default, (source, weight))
    linear.meta["val"] = torch.zeros(*shape[:-1], 4)
    graph.output([linear])
    return graph


def _asked(graph: Graph) -> set[type]:
    return {each for each in STOCK if may_change(each, graph)}


def test_every_stock_pass_has_a_row():
    assert set(STOCK) == set(TRIGGERS)


def test_a_linear_alone_needs_no_pass():
    assert _asked(_linear_graph()) == set()


def test_an_unknown_pass_runs():
    class Later(ExportPass):
        pass

    assert may_change(Later, _linear_graph())


@pytest.mark.parametrize(
    ("first", "asked"),
    [
        (ATEN.view_copy.default, {"ConvertToLinearPass"}),
        (ATEN.clone.default, {"XNNPACKRemoveCloneOpsTransform"}),
        (ops.edge.dim_order_ops._to_dim_order_copy.default, {"DimOrderOpsRevertPass"}),
        (ATEN.relu.default, {"FuseActivationPass"}),
        (ATEN.hardtanh.default, {"FuseActivationPass"}),
        (ATEN.cat.default, {"DecomposeConcatenate"}),
        (ATEN._softmax.default, {"ConvertToSDPAPass"}),
        (ATEN.upsample_bilinear2d.vec, {"ConvertToUpsampleBilinear2d", "ChannelsLastTaggedReshapePass"}),
        (ATEN.max_pool2d_with_indices.default, {"RemoveGetItemPass"}),
        (ATEN.max.dim, {"RemoveGetItemPass", "ChannelsLastTaggedReshapePass"}),
        (ATEN.mean.dim, {"ChannelsLastTaggedReshapePass"}),
        (ATEN._to_copy.default, {"ChannelsLastTaggedReshapePass", "RemoveRedundantCopyPass"}),
        (ATEN.constant_pad_nd.default, {"InsertPadQDQPass", "Conv1dUnsqueezePass"}),
        (ATEN.convolution.default, {"Conv1dUnsqueezePass", "ChannelsLastTaggedReshapePass"}),
        (ATEN._prelu_kernel.default, {"PReLUReshapePass"}),
        (ATEN._native_batch_norm_legit_no_training.default, {"FuseBatchNormPass", "DecomposeBatchNorm"}),
        (ATEN.bmm.default, {"ConvertToLinearPass"}),
        (ATEN.addmm.default, {"ConvertToLinearPass"}),
    ],
)
def test_an_operator_asks_for_its_passes(first, asked):
    assert {each.__name__ for each in _asked(_linear_graph(first))} == asked


def test_what_is_not_an_operator_asks_for_its_pass():
    custom, stored, unused = _linear_graph(), _linear_graph(shape=(1, 3, 8, 8)), _linear_graph()
    next(iter(custom.nodes)).meta["custom"] = {"delegate_constant_tag": "a"}
    assert _asked(custom) == {PropagateCustomMetaPass}
    value = next(iter(stored.nodes))
    value.meta["val"] = value.meta["val"].to(memory_format=torch.channels_last)
    assert _asked(stored) == {ChannelsLastTaggedReshapePass}
    with unused.inserting_before(unused.output_node()):
        constant = unused.call_function(ATEN.full.default, ([2], 1.0))
    constant.meta["val"] = torch.zeros(2)
    assert _asked(unused) == {ConvertToLinearPass, ConstPropPass}


@pytest.mark.export
def test_the_patterns_of_executorch_ask_for_their_passes():
    assert all(may_change(ConvertToUpsampleBilinear2d, pattern.graph) for pattern in bilinear_2d.get_graphs())
    assert all(may_change(ConvertToSDPAPass, pattern.graph) for pattern in sdpa.get_graphs())
