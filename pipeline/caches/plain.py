"""What static and dynamic caches share: layers without a state, the indexer of sparse attention, and samples."""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, DummyLayer

from pipeline.caches.layer import Layer, LayerPytree
from pipeline.caches.linear import fill_linear


def _derive_dummy(layer: Layer) -> None:
    layer.keys = layer.values = None


DUMMY_LAYER = LayerPytree(DummyLayer, leaves=(), derive=(_derive_dummy,), step=())


def derive_indexer(layer: Layer) -> None:
    """Set what follows from the indexer's keys ``[B, L, D]``; a layer that uses another's indexer has none."""
    layer.is_indexer_initialized = layer.indexer_keys is not None
    if layer.is_indexer_initialized:
        layer.indexer_dtype, layer.indexer_device = layer.indexer_keys.dtype, layer.indexer_keys.device


def indexer_step(cache: Cache, index: int) -> None:
    """Feed one token's indexer key ``[B, 1, D]``."""
    if (keys := cache.layers[index].indexer_keys) is not None:
        cache.update_indexer(torch.zeros(keys.shape[0], 1, keys.shape[2]), index)


def fill(layers: list[Layer]) -> None:
    """Feed three tokens ``[1, 1, 3, 4]`` to layers, through their own methods."""
    for layer in layers:
        if hasattr(layer, "conv_states"):
            fill_linear(layer)
        if hasattr(layer, "keys") and not isinstance(layer, DummyLayer):
            layer.update(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4))
        if hasattr(layer, "update_indexer"):
            layer.update_indexer(torch.zeros(1, 3, 2))
