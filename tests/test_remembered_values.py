"""A pass takes known values from the pass before, and computes what has changed."""

from __future__ import annotations

import torch
from executorch.exir.dialects._ops import ops
from executorch.exir.pass_base import ExportPass
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from pipeline.backends.remembered_values import functional_operator, remembered_values

ATEN = ops.edge.aten


def _two_views(size: list[int]) -> GraphModule:
    """``relu`` of ``x`` [4, 6], and a view of the result."""
    graph = Graph()
    value = graph.placeholder("x")
    value.meta["val"] = FakeTensorMode().from_tensor(torch.zeros(4, 6))
    active = graph.call_function(ATEN.relu.default, (value,))
    graph.output((graph.call_function(ATEN.view_copy.default, (active, size)),))
    return GraphModule(torch.nn.Module(), graph)


def _calls(module: GraphModule) -> list[Node]:
    return [node for node in module.graph.nodes if node.op == "call_function"]


def _passed(module: GraphModule) -> GraphModule:
    return ExportPass()(module).graph_module


def test_an_unchanged_value_is_the_same_object_in_the_next_pass():
    with remembered_values():
        first = _passed(_two_views([24]))
        second = _passed(first)
    for before, after in zip(_calls(first), _calls(second), strict=True):
        assert after is not before and after.meta["val"] is before.meta["val"]
    third = _passed(second)
    assert _calls(third)[0].meta["val"] is not _calls(second)[0].meta["val"]


def test_what_a_pass_changed_is_computed_anew():
    with remembered_values():
        module = _passed(_two_views([24]))
        view = _calls(module)[1]
        view.args = (view.args[0], [8, 3])
        assert _calls(_passed(module))[1].meta["val"].shape == (8, 3)
        view.args = (view.args[0], [24])
        _calls(module)[0].target = ATEN.argmax.default
        view.args = (view.args[0], [1, 1])
        changed = [node.meta["val"] for node in _calls(_passed(module))]
    assert changed[0].dtype == torch.int64 and changed[0].shape == ()
    assert changed[1].dtype == torch.int64 and changed[1].shape == (1, 1)


def test_equal_numbers_of_other_types_are_not_confused():
    graph = Graph()
    value = graph.placeholder("x")
    value.meta["val"] = FakeTensorMode().from_tensor(torch.zeros(4, dtype=torch.int64))
    sums = [graph.call_function(ATEN.add.Scalar, (value, other)) for other in (1, 1.0)]
    graph.output(tuple(sums))
    with remembered_values():
        dtypes = [node.meta["val"].dtype for node in _calls(_passed(GraphModule(torch.nn.Module(), graph)))]
    assert dtypes == [torch.int64, torch.float32]


def test_an_operator_that_writes_is_always_called():
    assert functional_operator(torch.ops.aten.add_.Tensor) is None
    assert functional_operator(torch.ops.aten.add.out) is None
    assert functional_operator(ATEN.relu.default) is torch.ops.aten.relu.default
