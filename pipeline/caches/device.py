"""The device's own cache: fixed storage written in place, one position for all layers, and its two layer kinds.

Legend: B batch, K key/value heads, S tokens of a call, L cache length, D head width.

The position is an input of a call and is never changed by it: the caller (a runner) knows how many tokens it has fed.
So one tensor serves every layer, and a program needs no output for it. A second prompt starts at position 0; what an
earlier one left behind is never read, because attention reads up to the position only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401  # registers llama::update_cache, llama::custom_sdpa
from transformers.cache_utils import Cache, StaticLayer

from pipeline.caches.layer import LayerPytree
from pipeline.caches.pytree import CachePytree


class CustomLayer(StaticLayer):
    """Storage ``[B, L, K, D]``, written by ``llama::update_cache``.

    ``update`` returns the storage as it lies: the attention function that reads it is ``attention.custom``, and a
    transpose here would become two real permutes of the whole cache a step.
    """

    reads_position_as_int = True

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, position: int | torch.SymInt
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values ``[B, K, S, D]`` at ``position`` and return the storage."""
        torch.ops.llama.update_cache(keys.transpose(1, 2), self.keys, position)
        torch.ops.llama.update_cache(values.transpose(1, 2), self.values, position)
        return self.keys, self.values


class PortableLayer(StaticLayer):
    """Storage ``[B, K, L, D]``, written by ``index_copy_``: core operators only."""

    reads_position_as_int = False

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, position: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values ``[B, K, S, D]`` at ``position`` (int64 ``[1]``) and return the storage."""
        where = torch.arange(keys.shape[2]) + position
        self.keys.index_copy_(2, where, keys.clone(memory_format=torch.contiguous_format))
        self.values.index_copy_(2, where, values.clone(memory_format=torch.contiguous_format))
        return self.keys, self.values


LAYERS: dict[str, type[CustomLayer] | type[PortableLayer]] = {"custom": CustomLayer, "portable": PortableLayer}


class DeviceCache(Cache):
    """A cache of device layers that share one position (int64 ``[1]``), which the caller sets before each call."""

    position: torch.Tensor
    _start: int | torch.SymInt | None = None  # the position as a number; read once a call, however many layers use it

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys and values ``[B, K, S, D]`` of one layer and return that layer's storage."""
        layer, where = self.layers[layer_idx], self._where()
        written: tuple[torch.Tensor, torch.Tensor] = layer.update(key_states, value_states, where)
        if layer_idx == len(self.layers) - 1:
            self._start = None  # the next call may have another position
        return written

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """Return the number of tokens before this call, int64 ``[1]``."""
        return self.position

    def get_query_offset(self, layer_idx: int = 0) -> int | torch.SymInt | torch.Tensor:
        """Return the position of the call's first token, as the layers' mask function wants it."""
        return self._where()

    def _where(self) -> int | torch.SymInt | torch.Tensor:
        if not self.layers[0].reads_position_as_int:
            return self.position
        if self._start is None:
            self._start = self.position.item()
            torch._check(self._start >= 0)
            torch._check(self._start < self.layers[0].max_cache_len)
        return self._start


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one layer's cache."""

    heads: int  # K
    key_width: int  # D of the keys
    value_width: int  # D of the values


def device_cache(
    attention: str, shapes: Sequence[LayerShape], max_length: int, dtype: torch.dtype, batch_size: int = 1
) -> DeviceCache:
    """Return an empty cache.

    Args:
        attention: a key of ``LAYERS``.
        shapes: of each layer.
        max_length: L, in tokens.
        dtype: of keys and values.
        batch_size: B.
    """
    layers = [LAYERS[attention](max_cache_len=max_length) for _ in shapes]
    for layer, shape in zip(layers, shapes, strict=True):
        sizes = (max_length, shape.heads) if layer.reads_position_as_int else (shape.heads, max_length)
        layer.keys = torch.zeros(batch_size, *sizes, shape.key_width, dtype=dtype)
        layer.values = torch.zeros(batch_size, *sizes, shape.value_width, dtype=dtype)
        layer.device = layer.keys.device
        layer.is_initialized = True
        del layer.cumulative_length
    cache = DeviceCache(layers=layers)
    cache.position = torch.zeros(1, dtype=torch.int64)
    return cache


def _sample() -> DeviceCache:
    return device_cache("portable", [LayerShape(1, 4, 4)] * 2, max_length=4, dtype=torch.float32)


DEVICE_CACHE = CachePytree(
    DeviceCache,
    "pteline.DeviceCache",
    tuple(LayerPytree(layer, leaves=("keys", "values"), static=("max_cache_len",)) for layer in LAYERS.values()),
    _sample,
    leaves=("position",),
)
