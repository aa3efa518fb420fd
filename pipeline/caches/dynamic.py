"""Dynamic caches: tensors that grow by concatenation. Keys and values are ``[B, K, length, D]``."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer

from pipeline.caches.pytree import CachePytree, LayerPytree

DYNAMIC_LAYER = LayerPytree(DynamicLayer, leaves=("keys", "values"))


def _sample() -> DynamicCache:
    tensors = (torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))
    return DynamicCache([tensors, tensors])


DYNAMIC_CACHE = CachePytree(DynamicCache, "pteline.DynamicCache", (DYNAMIC_LAYER,), _sample, lazy_layer=DynamicLayer)


def empty_dynamic_cache(
    config: PreTrainedConfig, batch_size: int = 1, dtype: torch.dtype = torch.float32
) -> DynamicCache:
    """Return a DynamicCache whose layers exist and hold nothing yet: keys and values ``[B, K, 0, D]``.

    An uninitialised layer has no leaves, so that the first step would have another tree spec than the second.
    """
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    cache = DynamicCache(config=config)
    for layer in cache.layers:
        empty = torch.zeros(batch_size, heads, 0, width, dtype=dtype)
        layer.lazy_initialization(empty, empty)
        layer.keys, layer.values = empty, empty.clone()
    return cache
