"""Which operators give the same result whenever they get the same arguments."""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch.fx import Node


def is_pure(node: Node, namespaces: Collection[str] = ("aten",)) -> bool:
    """Whether a call's result depends on its arguments alone, and it does nothing else; of these namespaces only."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace not in namespaces:
        return False
    return not node.is_impure() and torch.Tag.nondeterministic_seeded not in node.target.tags
