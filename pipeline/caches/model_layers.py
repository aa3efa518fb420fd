"""Layer classes that live in the file of one model: known by name, so that no model is imported before it is used."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import torch
from transformers.cache_utils import Cache

from pipeline.caches.layer import LayerPytree


@dataclass(frozen=True)
class ModelLayer:
    """A layer class by the module that defines it, and the row that it will have.

    Args:
        module: the model's file.
        name: of the class.
        like: its row, but for the class.
    """

    module: str
    name: str
    like: LayerPytree

    def row(self) -> LayerPytree | None:
        """Return the row, or ``None`` while the model is not imported: then no cache can hold such a layer."""
        module = sys.modules.get(self.module)
        return None if module is None else replace(self.like, cls=getattr(module, self.name))


def _index_step(cache: Cache, index: int) -> None:
    """Feed one token's index key ``[B, 1, 1, D]``."""
    cache.layers[index].update_index(torch.zeros_like(cache.layers[index].idx_keys[:, :, :1]))


def with_index_keys(row: LayerPytree, *more: str) -> LayerPytree:
    """Return ``row`` with the index keys of a sparse-attention layer."""
    return replace(row, leaves=(*row.leaves, *more, "idx_keys"), step=(*row.step, _index_step))


MINIMAX_M3 = "transformers.models.minimax_m3_vl.modeling_minimax_m3_vl"
