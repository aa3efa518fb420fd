"""The device's own cache: layers of ``device_layers.py`` that share one position.

Legend: B batch, K key/value heads, S tokens of a call, L cache length, W window, D head width.

The position is an input of a call and is never changed by it: the caller (a runner) knows how many tokens it has fed.
So one tensor serves every layer, and a program needs no output for it. A second prompt starts at position 0; what an
earlier one left behind has no effect: attention sees up to the position only, and a state is zero at position 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers.cache_utils import Cache, DummyLayer

from pipeline.caches.device_layers import (
    BatchLayer,
    Call,
    CustomLayer,
    CustomRingLayer,
    CustomStateLayer,
    CustomStateRingLayer,
    PortableLayer,
    PortableRingLayer,
    PortableStateLayer,
    PortableStateRingLayer,
    RingLayer,
    StateLayer,
)
from pipeline.caches.layer import Layer, LayerPytree, combined
from pipeline.caches.linear import LINEAR_LAYER
from pipeline.caches.plain import DUMMY_LAYER
from pipeline.caches.pytree import CachePytree


class DeviceCache(Cache):
    """A cache of device layers that share one position (int64 ``[1]``), which the caller sets before each call.

    Sequences of a batch stand at positions of their own: then it is the position of each token, int64 ``[B, S]``.
    """

    position: torch.Tensor
    attention: str  # "custom" or "portable": how the layers store keys and values, and who reads them
    max_length: int  # L
    rows: int  # B
    counts_by_number: bool  # whether the model asks for the number of earlier tokens as a number
    _call: Call | None = None

    def __setattr__(self, name: str, value: object) -> None:
        """Forget what the layers shared when a new position begins a new call."""
        if name == "position":
            object.__setattr__(self, "_call", None)
        object.__setattr__(self, name, value)

    @property
    def call(self) -> Call:
        """What the layers of the present call share."""
        if self._call is None:
            self._call = Call(self.position, self.max_length)
        return self._call

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys and values ``[B, K, S, D]`` of one layer and return what its queries may see."""
        seen: tuple[torch.Tensor, torch.Tensor] = self.layers[layer_idx].update(key_states, value_states, self.call)
        return seen

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        """Return a conv state ``[B, channels, kernel]``; zeros before a sequence's first token."""
        self.layers[layer_idx].begin(self.call)
        state: torch.Tensor = self.layers[layer_idx].conv_states[state_idx]
        return state

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        """Return a recurrent state; zeros before a sequence's first token."""
        self.layers[layer_idx].begin(self.call)
        state: torch.Tensor = self.layers[layer_idx].recurrent_states[state_idx]
        return state

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        """Append ``[B, channels, S]`` to a conv state and return ``[B, channels, kernel + S]``."""
        self.layers[layer_idx].begin(self.call)
        whole: torch.Tensor = self.layers[layer_idx].update_conv_state(conv_states, state_idx)
        return whole

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor:
        """Return the state of a layer as MiniMax asks its own cache for it."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        """Keep a state as MiniMax gives it to its own cache."""
        self.layers[layer_idx].recurrent_states[0].copy_(linear_cache)

    def get_seq_length(self, layer_idx: int = 0) -> int | torch.SymInt | torch.Tensor:
        """Return the number of tokens before this call: int64 ``[1]``, of a batch as ``position``; or the number."""
        return self.call.start if self.counts_by_number else self.position

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return L."""
        return self.max_length

    def get_query_offset(self, layer_idx: int = 0) -> int | torch.SymInt | torch.Tensor:
        """Return the position of the call's first token, as the layer's mask function wants it."""
        takes_number = self.attention == "custom" and not isinstance(self.layers[layer_idx], RingLayer)
        return self.call.start if takes_number else self.position

    def get_mask_sizes(self, query_length: int | torch.SymInt, layer_idx: int) -> tuple[int, int | torch.Tensor]:
        """Return how many entries ``update`` returns, and what added to their places gives their positions.

        That is 0, but for a ring, whose entries are in no order: there it is int64 ``[W + S]``.
        """
        layer = self.layers[layer_idx]
        if not isinstance(layer, RingLayer):
            return self.max_length, 0
        length = layer.max_cache_len + query_length
        return length, self.call.ring(layer.max_cache_len, query_length).positions - torch.arange(length)


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of the keys and values of one layer."""

    heads: int  # K
    key_width: int  # D of the keys
    value_width: int  # D of the values
    window: int | None = None  # W; None: full attention


@dataclass(frozen=True)
class StateShape:
    """One state of a linear-attention or state-space layer."""

    table: str  # "conv_states" or "recurrent_states"
    place: int  # its number in the table
    size: tuple[int, ...]  # [1, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps: keys and values, states, both, or nothing."""

    attention: AttentionShape | None = None
    states: tuple[StateShape, ...] = ()
    number_of_states: int = 0


# (attention, has states, has a window) -> the class of a layer that has keys and values
LAYERS: dict[tuple[str, bool, bool], type[Layer]] = {
    ("custom", False, False): CustomLayer,
    ("custom", False, True): CustomRingLayer,
    ("custom", True, False): CustomStateLayer,
    ("custom", True, True): CustomStateRingLayer,
    ("portable", False, False): PortableLayer,
    ("portable", False, True): PortableRingLayer,
    ("portable", True, False): PortableStateLayer,
    ("portable", True, True): PortableStateRingLayer,
}


def device_cache(
    attention: str, shapes: Sequence[LayerShape], max_length: int, dtype: torch.dtype, batch_size: int = 1
) -> DeviceCache:
    """Return an empty cache.

    Args:
        attention: ``custom`` or ``portable``.
        shapes: of each layer.
        max_length: L, in tokens.
        dtype: of keys and values.
        batch_size: B. More than one takes ``portable`` layers with full attention: a token that pads a row would be
            kept by a ring, and would change a state.
    """
    cache = DeviceCache(layers=[_layer(attention, shape, max_length, dtype, batch_size) for shape in shapes])
    cache.attention, cache.max_length, cache.rows = attention, max_length, batch_size
    cache.counts_by_number = False
    cache.position = torch.zeros((batch_size, 1) if batch_size > 1 else 1, dtype=torch.int64)
    return cache


def _layer(attention: str, shape: LayerShape, max_length: int, dtype: torch.dtype, batch_size: int) -> Layer:
    if shape.attention is None:
        layer = StateLayer(shape.number_of_states) if shape.states else DummyLayer()
    else:
        layer = _attention_layer(attention, shape, max_length, dtype, batch_size)
    for state in shape.states:
        getattr(layer, state.table)[state.place] = torch.zeros(batch_size, *state.size[1:], dtype=state.dtype)
    for derive in LINEAR_LAYER.derive if shape.states else ():
        derive(layer)
    layer.device = torch.device("cpu")
    return layer


def _attention_layer(attention: str, shape: LayerShape, max_length: int, dtype: torch.dtype, batch_size: int) -> Layer:
    assert shape.attention is not None
    heads, length = shape.attention.heads, min(max_length, shape.attention.window or max_length)
    sizes: tuple[int, ...] = (heads, length, 1) if attention == "custom" else (batch_size, heads, length)
    if batch_size > 1:
        layer, sizes = BatchLayer(length), (batch_size * heads * length,)
        layer.rows, layer.heads = batch_size, heads
    else:
        cls = LAYERS[attention, bool(shape.states), shape.attention.window is not None]
        layer = cls(length, shape.number_of_states) if shape.states else cls(length)
    layer.keys = torch.zeros(*sizes, shape.attention.key_width, dtype=dtype)
    layer.values = torch.zeros(*sizes, shape.attention.value_width, dtype=dtype)
    layer.is_initialized = True
    del layer.cumulative_length
    return layer


def _sample() -> DeviceCache:
    keys = AttentionShape(1, 4, 4)
    window = AttentionShape(1, 4, 4, window=2)
    states = tuple(StateShape(table, 0, (1, 2, 3), torch.float32) for table in ("conv_states", "recurrent_states"))
    shapes = [LayerShape(keys), LayerShape(window), LayerShape(None, states, 1), LayerShape(keys, states, 1)]
    return device_cache("portable", [*shapes, LayerShape(window, states, 1), LayerShape()], 4, torch.float32)


def _rows() -> tuple[LayerPytree, ...]:
    states = replace(LINEAR_LAYER, cls=StateLayer, settle=())  # a device's states are zero at the start by themselves
    rows = [states]
    for (_, has_states, _), cls in LAYERS.items():
        row = LayerPytree(cls, leaves=("keys", "values"), static=("max_cache_len",))
        rows.append(combined(cls, row, states) if has_states else row)
    batch = LayerPytree(BatchLayer, leaves=("keys", "values"), static=("max_cache_len", "rows", "heads"), step=())
    return (*rows, batch, DUMMY_LAYER)


DEVICE_CACHE = CachePytree(
    DeviceCache,
    "pteline.DeviceCache",
    _rows(),
    _sample,
    leaves=("position",),
    static=("attention", "max_length", "rows", "counts_by_number"),
)
