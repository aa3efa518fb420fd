"""Quantized caches whose state is tensors: 8-bit floats with a scale for each tensor.

Legend: B batch, K key/value heads, N tokens stored, D head width.

The first call chooses the scales, and they stay: such a cache is exported after it (``rewind`` would keep the scales
of whatever it was filled with). The count of tokens follows from the stored keys ``[B, K, N, D]``.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig
from transformers.cache_utils import Cache, Fp8QuantizedLayer, QuantizedCache

from pipeline.caches.layer import Layer, LayerPytree
from pipeline.caches.pytree import CachePytree


def _derive(layer: Layer) -> None:
    layer.cumulative_length = layer._quantized_keys[0].shape[-2]


def _step(cache: Cache, index: int) -> None:
    batch, heads, _, width = cache.layers[index]._quantized_keys[0].shape
    cache.update(torch.zeros(batch, heads, 1, width), torch.zeros(batch, heads, 1, width), index)


FP8_LAYER = LayerPytree(
    Fp8QuantizedLayer,
    leaves=("keys", "values"),  # empty: they hold the dtype
    tuples=("_quantized_keys", "_quantized_values"),
    derive=(_derive,),
    step=(_step,),
)


def _sample() -> QuantizedCache:
    cache = QuantizedCache("fp8", LlamaConfig(num_hidden_layers=2))
    for index in range(2):
        cache.update(torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4), index)
    return cache


QUANTIZED_CACHE = CachePytree(QuantizedCache, "pteline.QuantizedCache", (FP8_LAYER,), _sample)
