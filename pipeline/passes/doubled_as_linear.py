"""Write ``cat([x, x], -1)``, with which a model makes its rotary tables, as a matrix product.

XNNPACK takes no concatenation of one tensor with itself, so the tables of sines and cosines would wait for it, and the
first layer's queries and keys for them, in a delegate of their own. Every output element of the product is one input
element plus zeros: the values are equal, not only close (finite inputs; the sign of a zero may differ).
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from pipeline.passes.cat_as_linear import Product, cat_as_linear

_WIDEST = 256  # a head's rotary table is no wider, and the matrix grows with the square of it


def doubled_as_linear(program: ExportedProgram) -> ExportedProgram:
    """Replace every concatenation of a float tensor with itself along its last axis, of a fixed width up to 256."""
    return cat_as_linear(program, _doubled)


def _doubled(node: Node) -> Product | None:
    parts, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
    if len(parts) != 2 or parts[0] is not parts[1]:
        return None
    value = parts[0].meta["val"]
    width, is_last = value.shape[-1], dim in (-1, value.dim() - 1)
    if not is_last or value.dtype != torch.float32 or not isinstance(width, int) or width > _WIDEST:
        return None
    identity = torch.eye(width, dtype=torch.float32)
    return parts[0], f"doubled_{width}", torch.cat([identity, identity])
