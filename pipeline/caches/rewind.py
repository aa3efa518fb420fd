"""A cache that a model has filled, taken back to its start without giving up the tensors that its spec needs.

Legend: B batch, K key/value heads, D head width.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import (
    Cache,
    DynamicIndexedLayer,
    DynamicLayer,
    EncoderDecoderCache,
    Fp8QuantizedLayer,
)
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from pipeline.caches.layer import Layer
from runners.errors import UserError


def rewind(cache: Cache) -> Cache:
    """Take ``cache`` back to position 0 and return it: it decodes as a new one, and has the spec of a filled one.

    Static keys and values and all states become zeros, dynamic keys and values ``[B, K, 0, D]``. The encoder's keys of
    an encoder-decoder cache stay. A new cache of a class whose layers find their shapes in the first call (linear
    attention, indexers) is made by one call of the model on one token, and this.

    Raises:
        UserError: a layer chose its scales by what it was filled with.
    """
    if isinstance(cache, EncoderDecoderCache):
        rewind(cache.self_attention_cache)
        return cache
    if isinstance(cache, MiniMaxCache):
        cache.linear_cache = [torch.zeros_like(x) if isinstance(x, torch.Tensor) else x for x in cache.linear_cache]
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, Fp8QuantizedLayer):
            raise UserError(
                f"{type(cache).__name__}.layers.{index} (Fp8QuantizedLayer) chose its scales by the tokens that it "
                "holds, so it has no start that is common to all prompts. Fill a new one with the prompt."
            )
        _rewind_layer(layer)
    return cache


def _rewind_layer(layer: Layer) -> None:
    empty = _emptied(layer)
    layer.reset()
    for name, tensor in empty.items():
        setattr(layer, name, tensor)
    if "keys" in empty:
        layer.is_initialized = True
    if "indexer_keys" in empty:
        layer.is_indexer_initialized = True
    if hasattr(layer, "has_previous_state"):
        layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)


def _emptied(layer: Layer) -> dict[str, torch.Tensor]:
    """What ``reset`` drops because it grows by concatenation, without its tokens."""
    if not isinstance(layer, DynamicLayer) or layer.keys is None:
        return {}
    empty = {name: getattr(layer, name)[:, :, :0].clone() for name in ("keys", "values")}
    if getattr(layer, "idx_keys", None) is not None:  # the sparse layer of MiniMax-M3
        empty["idx_keys"] = layer.idx_keys[:, :, :0].clone()
    if isinstance(layer, DynamicIndexedLayer) and layer.indexer_keys is not None:
        empty["indexer_keys"] = layer.indexer_keys[:, :0].clone()
        if layer.indexer_position_ids is not None:
            empty["indexer_position_ids"] = layer.indexer_position_ids[..., :0].clone()
    return empty
