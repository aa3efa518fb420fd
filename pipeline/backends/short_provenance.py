"""Keep only the oldest ancestor in a node's provenance.

torch records in ``meta["from_node"]`` of every node the node it was made from, and inside that one the node before it, one level deeper with each pass,
and copies the whole chain deeply at each step. Lowering reads the oldest ancestor alone (debug handles are numbered by it).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx import Node, traceback
from torch.fx.traceback import NodeSource, NodeSourceAction


@contextmanager
def short_provenance() -> Iterator[None]:
    """Within the scope a node made from another remembers that one and its oldest ancestor, and none between them.

    Debug handles, and so the bytes of a lowered program, stay the same. On exit torch is as it was before.
    """
    before = traceback.NodeSource
    traceback.NodeSource = _ShortSource
    try:
        yield
    finally:
        traceback.NodeSource = before


class _ShortSource(NodeSource):
    def __init__(
        self,
        node: Node | None,
        pass_name: str = "",
        action: NodeSourceAction | list[NodeSourceAction] | None = None,
    ) -> None:
        super().__init__(None, pass_name, action)
        if node is not None:
            self.node_info = self.NodeInfo(name=node.name, target=str(node.target), graph_id=id(node.graph))
            self.from_node = _oldest(node.meta.get("from_node", []))


def _oldest(sources: list[NodeSource]) -> list[NodeSource]:
    """The root of a chain of sources as a list of its own, empty for no source. Sources are never changed, so it is shared, not copied."""
    while sources and sources[-1].from_node:
        sources = sources[-1].from_node
    return sources[-1:]
