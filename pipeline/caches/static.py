"""Static caches: tensors of the full length, written in place. Keys and values are ``[B, K, L, D]``.

``cumulative_length`` is a leaf of every layer: each layer adds to its own in place, so one tensor cannot serve all.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig
from transformers.cache_utils import StaticCache, StaticLayer

from pipeline.caches.pytree import CachePytree, LayerPytree

STATIC_LAYER = LayerPytree(
    StaticLayer,
    leaves=("cumulative_length", "keys", "values"),
    static=("max_cache_len", "batch_size", "num_heads", "k_head_dim", "v_head_dim"),
)


def _sample() -> StaticCache:
    config = LlamaConfig(num_hidden_layers=2, hidden_size=8, num_attention_heads=2, num_key_value_heads=1)
    cache = StaticCache(config, max_cache_len=4)
    cache.early_initialization(batch_size=1, num_heads=1, head_dim=4, dtype=torch.float32, device=torch.device("cpu"))
    return cache


STATIC_CACHE = CachePytree(StaticCache, "pteline.StaticCache", (STATIC_LAYER,), _sample)
