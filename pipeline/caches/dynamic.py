"""Dynamic caches: tensors that grow by concatenation. Keys and values are ``[B, K, length, D]``."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from pipeline.caches.layer import Layer, LayerPytree, attention_step, combined
from pipeline.caches.linear import LINEAR_LAYER
from pipeline.caches.model_layers import MINIMAX_M3, ModelLayer, with_index_keys
from pipeline.caches.plain import DUMMY_LAYER, derive_indexer, fill, indexer_step
from pipeline.caches.pytree import CachePytree
from pipeline.caches.window import (
    TracedDynamicSlidingWindowLayer,
    TracedDynamicWindow,
    TracedLinearAndDynamicWindowLayer,
)
from runners.errors import UserError

DYNAMIC_LAYER = LayerPytree(DynamicLayer, leaves=("keys", "values"))


def _settle_window(layer: Layer) -> None:
    """Copy a view of the last tokens, which a program would tell from a tensor of its own by the strides."""
    layer.keys, layer.values = layer.keys.contiguous(), layer.values.contiguous()


def _derive_count(layer: Layer) -> None:
    if not isinstance(layer, TracedDynamicWindow):
        layer.cumulative_length = int(layer.cumulative_length)
        layer._sliding_window_tensor = torch.tensor(layer.sliding_window)


DYNAMIC_SLIDING_LAYER = LayerPytree(
    DynamicSlidingWindowLayer,
    leaves=("cumulative_length", "keys", "values"),
    static=("sliding_window",),
    remade=("_sliding_window_tensor",),
    fixed=(("record_past", False),),
    settle=(_settle_window,),
    derive=(_derive_count,),
    traced=TracedDynamicSlidingWindowLayer,
)

DYNAMIC_INDEXED_LAYER = replace(
    DYNAMIC_LAYER,
    cls=DynamicIndexedLayer,
    leaves=("keys", "values", "indexer_keys", "indexer_position_ids"),
    optional=("indexer_keys", "indexer_position_ids"),
    derive=(derive_indexer,),
    step=(attention_step, indexer_step),
)

DYNAMIC_ROWS = (
    DYNAMIC_LAYER,
    DYNAMIC_SLIDING_LAYER,
    DYNAMIC_INDEXED_LAYER,
    LINEAR_LAYER,
    combined(LinearAttentionAndFullAttentionLayer, DYNAMIC_LAYER, LINEAR_LAYER),
    combined(
        LinearAttentionAndSlidingWindowAttentionLayer,
        DYNAMIC_SLIDING_LAYER,
        LINEAR_LAYER,
        traced=TracedLinearAndDynamicWindowLayer,
    ),
    DUMMY_LAYER,
)


def _sample() -> DynamicCache:
    """One layer of each kind, three tokens in: past the window of two."""
    cache = DynamicCache()
    cache.layers = [
        DynamicLayer(),
        DynamicSlidingWindowLayer(sliding_window=2),
        DynamicIndexedLayer(),
        LinearAttentionLayer(number_of_states=2),
        LinearAttentionAndFullAttentionLayer(),
        LinearAttentionAndSlidingWindowAttentionLayer(sliding_window=2),
        DummyLayer(),
    ]
    cache.layer_class_to_replicate = None
    fill(cache.layers)
    return cache


_MODEL_LAYERS = (ModelLayer(MINIMAX_M3, "MiniMaxM3VLSparseCacheLayer", with_index_keys(DYNAMIC_LAYER)),)

DYNAMIC_CACHE = CachePytree(
    DynamicCache,
    "pteline.DynamicCache",
    DYNAMIC_ROWS,
    _sample,
    model_layers=_MODEL_LAYERS,
    lazy_layer=DynamicLayer,
)


def empty_dynamic_cache(
    config: PreTrainedConfig, batch_size: int = 1, dtype: torch.dtype = torch.float32
) -> DynamicCache:
    """Return a DynamicCache whose layers exist and hold nothing yet: keys and values ``[B, K, 0, D]``.

    An uninitialised layer has no leaves, so that the first step would have another tree spec than the second.

    Raises:
        UserError: a layer holds linear-attention states, whose shapes the config does not tell; or an indexer's keys.
    """
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    cache = DynamicCache(config=config)
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin | DynamicIndexedLayer):
            raise UserError(
                f"DynamicCache.layers.{index} is a {type(layer).__name__}: the config does not tell the shapes of its "
                "states. Run the model once on one token with DynamicCache(config=config) and call "
                "pipeline.caches.rewind(cache)."
            )
        if isinstance(layer, DummyLayer):
            continue
        empty = torch.zeros(batch_size, heads, 0, width, dtype=dtype)
        layer.lazy_initialization(empty, empty)
        layer.keys, layer.values = empty, empty.clone()
    return cache
