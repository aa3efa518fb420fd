"""Keep only the oldest ancestor in a node's provenance.

torch records in ``meta["from_node"]`` the node that a node was made from, and inside that the node before it, one level
more with each pass, and copies the whole chain at each step. Lowering reads only its end: debug handles are numbered by
the oldest ancestor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx import Node, traceback
from torch.fx.traceback import NodeSource, NodeSourceAction

from pipeline.substitution import replaced


@contextmanager
def short_provenance() -> Iterator[None]:
    """Within the scope a node made from another remembers that one and its oldest ancestor, and none between them."""
    with replaced(traceback, "NodeSource", _ShortSource):
        yield


class _ShortSource(NodeSource):  # type: ignore[misc]  # torch is not type-checked here
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
    """The end of a chain, none for no chain. A source does not change once it is made, so it is shared, not copied."""
    while sources and sources[-1].from_node:
        sources = sources[-1].from_node
    return list(sources[-1:])
