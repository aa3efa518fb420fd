"""A pass takes known values from the pass before, and computes what has changed."""

from __future__ import annotations

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.exir.dialects._ops import ops
from executorch.exir.lowered_backend_module import LoweredBackendModule
from executorch.exir.pass_base import ExportPass
from torch._higher_order_ops.executorch_call_delegate import executorch_call_delegate
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from pipeline.quick.remembered_values import functional_operator, remembered_values

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


def _layers(first: torch.Tensor, second: torch.Tensor) -> GraphModule:
    """``relu`` of each of two inputs."""
    graph, mode = Graph(), FakeTensorMode()
    inputs = [graph.placeholder(name) for name in "xy"]
    for node, value in zip(inputs, (first, second), strict=True):
        node.meta["val"] = mode.from_tensor(value)
    graph.output(tuple(graph.call_function(ATEN.relu.default, (node,)) for node in inputs))
    return GraphModule(torch.nn.Module(), graph)


def test_a_layer_takes_the_values_of_one_like_it():
    with remembered_values():
        first, second = (node.meta["val"] for node in _calls(_passed(_layers(torch.zeros(4, 6), torch.zeros(4, 6)))))
    assert first is second


@pytest.mark.parametrize(
    "other",
    [torch.zeros(6, 4), torch.zeros(6, 4).t(), torch.zeros(4, 6, dtype=torch.float64), torch.zeros(8, 6)[:4]],
    ids=["shape", "strides", "dtype", "like it after all"],
)
def test_a_layer_computes_what_differs(other: torch.Tensor):
    module = _layers(torch.zeros(4, 6), other)
    plain = [node.meta["val"] for node in _calls(_passed(module))]
    with remembered_values():
        found = [node.meta["val"] for node in _calls(_passed(module))]
    for mine, expected in zip(found, plain, strict=True):
        assert (mine.shape, mine.stride(), mine.dtype) == (expected.shape, expected.stride(), expected.dtype)


def test_sizes_that_only_data_tell_are_not_shared():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    graph = Graph()
    inputs = [graph.placeholder(name) for name in "xy"]
    for node in inputs:
        node.meta["val"] = mode.from_tensor(torch.zeros(1, dtype=torch.int64))
    graph.output(tuple(graph.call_function(torch.ops.aten._local_scalar_dense.default, (node,)) for node in inputs))
    with remembered_values():
        first = _passed(GraphModule(torch.nn.Module(), graph))
        numbers = [node.meta["val"] for node in _calls(first)]
        again = [node.meta["val"] for node in _calls(_passed(first))]
    assert numbers[0].node.expr != numbers[1].node.expr
    assert [mine is before for mine, before in zip(again, numbers, strict=True)] == [True, True]


class _Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * 2)


def test_a_delegate_is_not_run_for_the_shapes_of_its_outputs(monkeypatch):
    program = torch.export.export(_Scaled(), (torch.zeros(2, 8),))
    edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    module = edge.exported_program().graph_module
    expected = [node.meta["val"] for node in _calls(module) if node.target is executorch_call_delegate]
    runs: list[object] = []
    whole = LoweredBackendModule.original_module.fget
    monkeypatch.setattr(type(whole(_lowered(module))), "module", lambda self, **_: runs.append(self))
    with remembered_values():
        passed = _passed(module)
    found = [node.meta["val"] for node in _calls(passed) if node.target is executorch_call_delegate]
    assert len(expected) == 1 and not runs
    assert [value.shape for value in found[0]] == [value.shape for value in expected[0]]


def _lowered(module: GraphModule) -> LoweredBackendModule:
    return next(each for each in module.children() if isinstance(each, LoweredBackendModule))
