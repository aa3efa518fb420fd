"""Sizes that XNNPACK is told before the first call, for tensors whose size a call decides.

executorch writes the largest ones into the delegate. XNNPACK takes its workspace for those and fills it with zeros at
the first call, though each call tells it the sizes anew and it takes more when it needs more. So the smallest are
written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from executorch.backends.xnnpack.operators import node_visitor
from torch.fx import Node

from pipeline.substitution import replaced


@contextmanager
def smallest_first_sizes() -> Iterator[None]:
    """Within the scope delegates of XNNPACK are written with their smallest sizes."""
    with replaced(node_visitor, "get_shape", _smallest_shape):
        yield


def _smallest_shape(node: Node) -> list[int]:
    return [_smallest(size) for size in node.meta["val"].shape]


def _smallest(size: int | torch.SymInt) -> int:
    """A size where each symbol in it is 1. (A range's lower end may be 2, by torch's rule for traced sizes.)"""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, 1)))
