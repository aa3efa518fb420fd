"""Static caches: tensors of a fixed length, written in place. Keys and values are ``[B, K, L, D]``.

``cumulative_length`` is a leaf of every layer: each layer adds to its own in place, so one tensor cannot serve all.
A sliding-window layer of transformers counts in a Python number beside it and lets the tensor stand still once the
window is full; as a leaf the tensor is the true count.
"""

from __future__ import annotations

from dataclasses import replace

from transformers import LlamaConfig
from transformers.cache_utils import (
    DummyLayer,
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionAndStaticSlidingWindowAttentionLayer,
    LinearAttentionLayer,
    StaticCache,
    StaticIndexedLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from pipeline.caches.layer import Layer, LayerPytree, attention_step, combined
from pipeline.caches.linear import LINEAR_LAYER
from pipeline.caches.model_layers import MINIMAX_M3, ModelLayer, with_index_keys
from pipeline.caches.plain import DUMMY_LAYER, derive_indexer, fill, indexer_step
from pipeline.caches.pytree import CachePytree
from pipeline.caches.window import TracedLinearAndStaticWindowLayer, TracedStaticSlidingWindowLayer

STATIC_LAYER = LayerPytree(
    StaticLayer,
    leaves=("cumulative_length", "keys", "values"),
    static=("max_cache_len", "batch_size", "num_heads", "k_head_dim", "v_head_dim"),
)


def _settle_count(layer: Layer) -> None:
    """Bring the tensor up to the Python number, which a program that ran on these tensors may be ahead of."""
    if not isinstance(layer, TracedStaticSlidingWindowLayer | TracedLinearAndStaticWindowLayer):
        layer.cumulative_length.clamp_(min=layer.cumulative_length_int)


def _derive_count(layer: Layer) -> None:
    if not isinstance(layer, TracedStaticSlidingWindowLayer | TracedLinearAndStaticWindowLayer):
        layer.cumulative_length_int = int(layer.cumulative_length)


STATIC_SLIDING_LAYER = replace(
    STATIC_LAYER,
    cls=StaticSlidingWindowLayer,
    static=(*STATIC_LAYER.static, "_is_croppable"),
    settle=(_settle_count,),
    derive=(_derive_count,),
    traced=TracedStaticSlidingWindowLayer,
)


STATIC_INDEXED_LAYER = replace(
    STATIC_LAYER,
    cls=StaticIndexedLayer,
    leaves=(*STATIC_LAYER.leaves, "indexer_cumulative_length", "indexer_keys", "indexer_position_ids"),
    optional=("indexer_cumulative_length", "indexer_keys", "indexer_position_ids"),
    derive=(derive_indexer,),
    step=(attention_step, indexer_step),
)


STATIC_ROWS = (
    STATIC_LAYER,
    STATIC_SLIDING_LAYER,
    STATIC_INDEXED_LAYER,
    LINEAR_LAYER,
    combined(LinearAttentionAndStaticFullAttentionLayer, STATIC_LAYER, LINEAR_LAYER),
    combined(
        LinearAttentionAndStaticSlidingWindowAttentionLayer,
        STATIC_SLIDING_LAYER,
        LINEAR_LAYER,
        traced=TracedLinearAndStaticWindowLayer,
    ),
    DUMMY_LAYER,
)


def _sample() -> StaticCache:
    """One layer of each kind, three tokens in: past the window of two."""
    cache = StaticCache(LlamaConfig(num_hidden_layers=1), max_cache_len=8)
    cache.layers = [
        StaticLayer(8),
        StaticSlidingWindowLayer(8, sliding_window=2),
        StaticIndexedLayer(8),
        LinearAttentionLayer(number_of_states=2),
        LinearAttentionAndStaticFullAttentionLayer(8),
        LinearAttentionAndStaticSlidingWindowAttentionLayer(8, sliding_window=2),
        DummyLayer(),
    ]
    fill(cache.layers)
    return cache


_MODEL_LAYERS = (
    ModelLayer(MINIMAX_M3, "MiniMaxM3VLSparseStaticCacheLayer", with_index_keys(STATIC_LAYER, "idx_cumulative_length")),
)

STATIC_CACHE = CachePytree(StaticCache, "pteline.StaticCache", STATIC_ROWS, _sample, model_layers=_MODEL_LAYERS)
