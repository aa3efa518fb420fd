"""Map over the arguments of an operator without describing their nesting first.

Each operator that is traced or interpreted has its arguments mapped several times over, and pytree takes them apart and
puts them together by way of a description of the whole tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import UnionType
from typing import Any

from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils import _pytree as pytree

from pipeline.substitution import replaced

_map_only = pytree.tree_map_only
_SEQUENCES = {tuple: tuple, list: list, immutable_list: immutable_list}
_MAPPINGS = {dict: dict, immutable_dict: immutable_dict}

# Trees are of any type: torch's own function is annotated like this.
_Function = Callable[[Any], Any]


@contextmanager
def quick_trees() -> Iterator[None]:
    """Within the scope ``tree_map_only`` walks tuples, lists and dicts itself, and leaves other nodes to pytree."""
    with replaced(pytree, "tree_map_only", tree_map_only):
        yield


def tree_map_only(chosen: Any, /, func: _Function, tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """As ``torch.utils._pytree.tree_map_only``: ``func`` on leaves of the types ``chosen``, the others as they are."""
    if is_leaf is not None or not isinstance(chosen, (type, tuple, UnionType)):
        return _map_only(chosen, func, tree, is_leaf)

    def mapped(node: Any) -> Any:
        kind = type(node)
        if kind in _SEQUENCES:
            return _SEQUENCES[kind]([mapped(each) for each in node])
        if kind in _MAPPINGS:
            return _MAPPINGS[kind]({name: mapped(each) for name, each in node.items()})
        if kind in pytree.SUPPORTED_NODES or isinstance(node, tuple):  # a named one is a node too
            return _map_only(chosen, func, node)
        return func(node) if isinstance(node, chosen) else node

    return mapped(tree)
