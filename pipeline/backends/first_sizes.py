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
    """A size where each symbol in it is the least of its range, in all tensors alike, so that they fit together.

    Not 1, of which a convolution without padding would leave less than nothing. (The least of a traced size is 2 at
    least, by torch's rule.) A symbol or a size that would be below 1, as a difference of two symbols may be, is 1.
    """
    if isinstance(size, int):
        return size
    expression, ranges = size.node.expr, size.node.shape_env.var_to_range
    lowest = {symbol: max(1, ranges[symbol].lower) for symbol in expression.free_symbols}
    return max(1, int(expression.subs(lowest)))
