"""Group what a backend takes into as few delegates as the graph allows, without a cycle between them.

A node that the backend takes has a level: the number of times that a path to it leaves the backend and comes back, at
most. The nodes of one level become one delegate. Every path that leaves a delegate comes back on a higher level, so no
two delegates can wait for each other; and a path with n returns needs n delegates however they are chosen.

executorch's own grouping merges pairs and looks for paths through single nodes only: two of its groups may wait for
each other, and lowering then stops with "Invalid partition, found dependency cycles".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.fx import Graph, Node
from torch.fx.passes.infra.partitioner import Partition

_OUTSIDE = -1  # before any delegate


def partitions_by_level(graph: Graph, groups: Sequence[Iterable[Node]]) -> list[Partition]:
    """Return one partition a level, in the order in which they run.

    Args:
        graph: of an exported program.
        groups: nodes that the backend takes, in groups that must stay together; each node is in one of them.
    """
    kept = [list(group) for group in groups]
    while True:
        levels, torn = _levels(graph, kept)
        if torn is None:
            break
        kept.pop(torn)  # a path leaves the group and comes back to it: the backend cannot have it whole
    members: dict[int, list[Node]] = {}
    for group, level in zip(kept, levels, strict=True):
        members.setdefault(level, []).extend(group)
    place = {node: index for index, node in enumerate(graph.nodes)}
    return [Partition(id=i, nodes=sorted(members[i], key=place.__getitem__)) for i in sorted(members)]


def _levels(graph: Graph, groups: Sequence[Sequence[Node]]) -> tuple[list[int], int | None]:
    """The level of each group; or the number of a group that has none."""
    group_of = {node: index for index, group in enumerate(groups) for node in group if node.op == "call_function"}
    levels = [0] * len(groups)
    while True:
        before = list(levels)
        outside: dict[Node, int] = {}  # of a node that the backend does not take: the highest level before it
        for node in graph.nodes:
            mine = group_of.get(node)
            needed = [_needed(x, mine, group_of, levels, outside) for x in node.all_input_nodes]
            highest = max(needed, default=_OUTSIDE)
            if mine is None:
                outside[node] = highest
                continue
            levels[mine] = max(levels[mine], highest)
            if levels[mine] > len(groups):
                return levels, mine
        if levels == before:
            return levels, None


def _needed(
    node: Node, user: int | None, group_of: dict[Node, int], levels: Sequence[int], outside: dict[Node, int]
) -> int:
    """The least level of a user (the number of its group, or None outside the backend) of ``node``."""
    mine = group_of.get(node)
    if mine is not None:
        return levels[mine]
    return outside[node] + (1 if user is not None else 0)
