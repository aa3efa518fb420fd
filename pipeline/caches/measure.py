"""The sizes of a model's cache, as the model itself fills one: configurations name them in many ways."""

from __future__ import annotations

import torch
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from pipeline.caches.device import AttentionShape, LayerShape, StateShape
from pipeline.caches.layer import Layer
from runners.errors import UserError

_STATES = ("conv_states", "recurrent_states")


def layer_shapes(cache: Cache) -> list[LayerShape]:
    """Return what each layer of a dynamic cache keeps, after the model has run with it.

    Raises:
        UserError: a layer's class has no device layer, or the model left a layer empty.
    """
    return [layer_shape(layer, index) for index, layer in enumerate(cache.layers)]


def layer_shape(layer: Layer, index: int) -> LayerShape:
    """Return what one layer keeps; ``index`` is for the message.

    Raises:
        UserError: as ``layer_shapes``.
    """
    if isinstance(layer, DummyLayer):
        return LayerShape()
    has_attention, has_states = isinstance(layer, DynamicLayer), isinstance(layer, LinearAttentionLayer)
    if isinstance(layer, DynamicIndexedLayer) or not (has_attention or has_states):
        raise UserError(f"model: layer {index} keeps a {type(layer).__name__}, and a device has no layer for it yet.")
    return LayerShape(
        attention=_attention(layer, index) if has_attention else None,
        states=_states(layer) if has_states else (),
        number_of_states=layer.number_of_states if has_states else 0,
    )


def _attention(layer: DynamicLayer, index: int) -> AttentionShape:
    if not layer.is_initialized:
        raise UserError(f"model: layer {index} wrote no keys and values into the cache that it was given.")
    window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
    return AttentionShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3], window)


def _states(layer: LinearAttentionLayer) -> tuple[StateShape, ...]:
    return tuple(
        StateShape(table, place, tuple(state.shape), state.dtype)
        for table in _STATES
        for place, state in getattr(layer, table).items()
        if isinstance(state, torch.Tensor)
    )
