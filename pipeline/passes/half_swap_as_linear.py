"""Write the rotary embedding's half-swap, ``cat([-x[..., h:], x[..., :h]], -1)``, as a matrix product.

The matrix is a signed permutation. XNNPACK takes no slice of a tensor with a dynamic axis, so each rotary embedding
would split the graph. Every output element of the product is one input element times plus or minus one, plus zeros: the
values are equal, not only close (finite inputs; the sign of a zero may differ).
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from pipeline.passes.cat_as_linear import Product, cat_as_linear

_ATEN = torch.ops.aten


def half_swap_as_linear(program: ExportedProgram) -> ExportedProgram:
    """Replace every half-swap of a float tensor along its last axis of fixed, even width."""
    return cat_as_linear(program, _half_swap)


def half_swap_matrix(width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the ``[width, width]`` weight W with ``x @ W.T == cat([-x[..., h:], x[..., :h]], -1)``."""
    half = torch.eye(width // 2, dtype=dtype)
    zero = torch.zeros_like(half)
    return torch.cat([torch.cat([zero, -half], 1), torch.cat([half, zero], 1)], 0)


def _half_swap(node: Node) -> Product | None:
    source = _swapped(node)
    if source is None:
        return None
    width = int(source.meta["val"].shape[-1])
    return source, f"half_swap_{width}", half_swap_matrix(width, source.meta["val"].dtype)


def _swapped(node: Node) -> Node | None:
    """The tensor whose halves ``node`` swaps, or None where it does something else."""
    parts, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
    if len(parts) != 2 or parts[0].target is not _ATEN.neg.default or dim not in (-1, node.meta["val"].dim() - 1):
        return None
    upper, lower = parts[0].args[0], parts[1]
    if (
        upper.target is not _ATEN.slice.Tensor
        or lower.target is not _ATEN.slice.Tensor
        or upper.args[0] is not lower.args[0]
    ):
        return None
    source = upper.args[0]
    width = source.meta["val"].shape[-1]
    if not isinstance(width, int) or width % 2 or source.meta["val"].dtype != torch.float32:
        return None
    last = source.meta["val"].dim() - 1
    halves = [_bounds(x, width) for x in (upper, lower)]
    return source if halves == [(last, width // 2, width, 1), (last, 0, width // 2, 1)] else None


def _bounds(node: Node, width: int) -> tuple[int, int, int, int]:
    """(axis, start, end, step) of a slice, with defaults filled in and the end clamped."""
    given = tuple(node.args[1:])
    axis, start, end, step = given + (0, 0, width, 1)[len(given) :]
    rank = node.meta["val"].dim()
    return axis % rank, start or 0, min(width if end is None else end, width), step
