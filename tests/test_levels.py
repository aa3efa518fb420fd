"""Delegates by level: as few as the graph allows, and none waits for another that waits for it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Graph, Node

from pipeline.backends.levels import partitions_by_level


def graph_of(edges: list[list[int]]) -> tuple[Graph, list[Node]]:
    """A graph whose node i has the earlier nodes ``edges[i]`` as inputs; without any, the placeholder."""
    graph = Graph()
    start = graph.placeholder("x")
    nodes: list[Node] = []
    for inputs in edges:
        nodes.append(graph.call_function(torch.stack, ([nodes[i] for i in inputs] or [start],)))
    graph.output(tuple(nodes))
    return graph, nodes


def names(nodes: list[Node], partitions) -> list[list[int]]:
    return [sorted(nodes.index(node) for node in partition.nodes) for partition in partitions]


def test_what_no_outside_node_parts_is_one_delegate() -> None:
    graph, nodes = graph_of([[], [0], [], [1, 2]])
    assert names(nodes, partitions_by_level(graph, [[n] for n in nodes])) == [[0, 1, 2, 3]]


def test_a_path_through_the_outside_parts_two_delegates() -> None:
    graph, nodes = graph_of([[], [0], [1], [0]])
    taken = [[n] for n in nodes if n is not nodes[1]]
    assert names(nodes, partitions_by_level(graph, taken)) == [[0, 3], [2]]


def test_two_delegates_never_wait_for_each_other() -> None:
    """a1 -> outside -> b1 and b0 -> outside -> a0: merged by pairs, {a0, a1} and {b0, b1} would wait for each other."""
    graph, nodes = graph_of([[], [0], [1], [], [3], [4]])  # 0 -> 1(out) -> 2, 3 -> 4(out) -> 5
    taken = [[nodes[0]], [nodes[2]], [nodes[3]], [nodes[5]]]
    assert names(nodes, partitions_by_level(graph, taken)) == [[0, 3], [2, 5]]


def test_a_group_stays_together_and_one_that_the_outside_tears_is_left_out() -> None:
    graph, nodes = graph_of([[], [0], [1], []])
    assert names(nodes, partitions_by_level(graph, [[nodes[0]], [nodes[2], nodes[3]]])) == [[0], [2, 3]]
    assert names(nodes, partitions_by_level(graph, [[nodes[0], nodes[2]], [nodes[3]]])) == [[3]]


@given(st.data())
def test_partitions_of_any_graph_have_no_cycle_and_lose_no_node(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 14))
    edges = [sorted(data.draw(st.sets(st.integers(0, i - 1), max_size=3))) if i else [] for i in range(size)]
    graph, nodes = graph_of(edges)
    taken = data.draw(st.sets(st.integers(0, size - 1)))
    partitions = partitions_by_level(graph, [[nodes[i]] for i in sorted(taken)])
    assert sorted(i for part in names(nodes, partitions) for i in part) == sorted(taken)
    home = {i: ("delegate", number) for number, part in enumerate(names(nodes, partitions)) for i in part}
    waits: dict[object, set[object]] = {}
    for i, inputs in enumerate(edges):
        waits.setdefault(home.get(i, i), set()).update(home.get(j, j) for j in inputs)
    done: set[object] = set()
    while ready := [part for part, before in waits.items() if part not in done and before - {part} <= done]:
        done.update(ready)
    assert done == set(waits)
