"""The device's own encoder-decoder cache: self-attention as in ``device.py``, and the encoder's keys and values.

Legend: B batch, K key/value heads, E most positions of the encoder, e positions of one input, D head width.

One method of a program computes the encoder's keys and values and writes them, another only reads them. transformers
decides between the two by Python flags, so the two methods are traced with two caches that differ in ``encoded`` alone
and share their tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from transformers.cache_utils import Cache, EncoderDecoderCache, StaticLayer

from pipeline.caches.device import DEVICE_CACHE, AttentionShape, DeviceCache, LayerShape, device_cache
from pipeline.caches.encoder_decoder import EncoderDecoderPytree, PairContext
from pipeline.caches.layer import Layer, LayerPytree
from pipeline.caches.pytree import CachePytree

KeysValues = tuple[torch.Tensor, torch.Tensor]


class CrossLayer(StaticLayer):
    """Storage ``[B, K, E, D]`` of the encoder's keys or values; ``max_cache_len`` is E."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: object, **__: object) -> KeysValues:
        """Write keys and values ``[B, K, e, D]`` into the first e places and return them as they came.

        What lies behind them is of an earlier input: a reader needs a mask, unless e is always E.
        """
        self._write(self.keys, keys)
        self._write(self.values, values)
        return keys, values

    def _write(self, stored: torch.Tensor, new: torch.Tensor) -> None:
        length = new.shape[2]
        if isinstance(length, int) and length == self.max_cache_len:
            stored.copy_(new)
        else:
            stored.index_copy_(2, torch.arange(length), new.clone(memory_format=torch.contiguous_format))


class CrossCache(Cache):
    """A cache of cross layers."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> KeysValues:
        """Write the encoder's keys and values ``[B, K, e, D]`` of one layer."""
        written: KeysValues = self.layers[layer_idx].update(key_states, value_states)
        return written


class DeviceEncoderDecoderCache(EncoderDecoderCache):
    """A ``DeviceCache`` and a ``CrossCache``; ``encoded`` says whether the latter holds the encoder's keys already."""

    encoded: bool

    def __init__(self, decoder: DeviceCache, encoder: CrossCache, *, encoded: bool) -> None:
        self.self_attention_cache, self.cross_attention_cache, self.encoded = decoder, encoder, encoded
        self.is_updated = dict.fromkeys(range(len(encoder.layers)), encoded)

    @property
    def layers(self) -> list[Layer]:
        """The layers of self-attention: those that a call writes."""
        layers: list[Layer] = self.self_attention_cache.layers
        return layers

    def when(self, *, encoded: bool) -> DeviceEncoderDecoderCache:
        """Return a cache of the same tensors, for a method that reads the encoder's keys or one that computes them."""
        return DeviceEncoderDecoderCache(self.self_attention_cache, self.cross_attention_cache, encoded=encoded)


class DevicePairContext(PairContext):
    """The context of both caches, and which of the two methods it is of."""

    encoded: bool


class DevicePairPytree(EncoderDecoderPytree):
    """As ``EncoderDecoderPytree``, but the flags are those of ``encoded``, which is fixed at build time."""

    def context(self, cache: Cache) -> DevicePairContext:  # type: ignore[override]
        """Return the contexts of both caches and the flag."""
        return {**super().context(cache), "encoded": cache.encoded}

    def unflatten(self, leaves: Sequence[torch.Tensor], context: PairContext) -> Cache:  # type: ignore[override]
        """Return a cache that holds exactly ``leaves``."""
        cache = super().unflatten(leaves, context)
        cache.encoded = context["encoded"]  # type: ignore[typeddict-item]  # it is this class's own context
        cache.is_updated = dict.fromkeys(range(len(cache.cross_attention_cache.layers)), cache.encoded)
        return cache

    def _require_encoded(self, cache: Cache) -> None:
        """Both states can be flattened: a device's storage is there before it is written."""


def encoder_decoder_cache(
    shapes: Sequence[LayerShape], cross: Sequence[AttentionShape], max_length: int, positions: int, dtype: torch.dtype
) -> DeviceEncoderDecoderCache:
    """Return an empty cache for ``portable`` attention and a batch of one.

    Args:
        shapes: of each layer's self-attention.
        cross: of each layer's cross-attention.
        max_length: L, tokens of the decoder.
        positions: E.
        dtype: of keys and values.
    """
    decoder = device_cache("portable", shapes, max_length, dtype)
    encoder = CrossCache(layers=[_cross_layer(shape, positions, dtype) for shape in cross])
    return DeviceEncoderDecoderCache(decoder, encoder, encoded=True)


def part_of(path: str) -> Literal["self", "cross"]:
    """Which attention the leaf at ``path`` of such a cache is of."""
    return "cross" if path.startswith("cross_attention_cache.") else "self"


def _cross_layer(shape: AttentionShape, positions: int, dtype: torch.dtype) -> CrossLayer:
    layer = CrossLayer(positions)
    layer.keys = torch.zeros(1, shape.heads, positions, shape.key_width, dtype=dtype)
    layer.values = torch.zeros(1, shape.heads, positions, shape.value_width, dtype=dtype)
    layer.is_initialized, layer.device = True, torch.device("cpu")
    del layer.cumulative_length
    return layer


def _cross_sample() -> CrossCache:
    return CrossCache(layers=[_cross_layer(AttentionShape(1, 4, 4), 3, torch.float32)])


def _sample() -> DeviceEncoderDecoderCache:
    shape = AttentionShape(1, 4, 4)
    return encoder_decoder_cache([LayerShape(shape)] * 2, [shape] * 2, max_length=4, positions=3, dtype=torch.float32)


CROSS_CACHE = CachePytree(
    CrossCache,
    "pteline.CrossCache",
    (LayerPytree(CrossLayer, leaves=("keys", "values"), static=("max_cache_len",)),),
    _cross_sample,
)

DEVICE_ENCODER_DECODER_CACHE = DevicePairPytree(
    DeviceEncoderDecoderCache,
    "pteline.DeviceEncoderDecoderCache",
    (),
    _sample,
    inner=(DEVICE_CACHE, CROSS_CACHE),
)
