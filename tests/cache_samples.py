"""Small caches of each class, and scopes that look at the pytree registries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.fx._pytree as fx_pytree
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticCache

from pipeline.caches import (
    AttentionShape,
    DeviceCache,
    LayerShape,
    device_cache,
)
from tests import tiny

REGISTRIES = (
    pytree.SUPPORTED_NODES,
    pytree.SUPPORTED_SERIALIZED_TYPES,
    pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE,
    fx_pytree.SUPPORTED_NODES,
    fx_pytree.SUPPORTED_NODES_EXACT_MATCH,
)


def snapshot() -> list[dict]:
    return [dict(registry) for registry in REGISTRIES]


@contextmanager
def nothing_changes() -> Iterator[None]:
    before = snapshot()
    yield
    assert snapshot() == before


@contextmanager
def foreign(cls: type, name: str | None, *, with_fx: bool) -> Iterator[None]:
    """Another library's registration of ``cls``, with a context of its own; the registries are given back after it."""
    before = snapshot()
    pytree._private_register_pytree_node(
        cls, lambda cache: ([], "theirs"), lambda leaves, context: cls(), serialized_type_name=name
    )
    if with_fx:
        fx_pytree.register_pytree_flatten_spec(cls, lambda cache, spec: [])
    try:
        yield
    finally:
        for registry, content in zip(REGISTRIES, before, strict=True):
            registry.clear()
            registry.update(content)


def dynamic(length: int = 3, layers: int = 2) -> DynamicCache:
    return DynamicCache([(torch.randn(1, 2, length, 4), torch.randn(1, 2, length, 4)) for _ in range(layers)])


def static(length: int = 8) -> StaticCache:
    cache = StaticCache(config=tiny.llama_config(), max_cache_len=length)
    cache.early_initialization(batch_size=1, num_heads=2, head_dim=16, dtype=torch.float32, device=torch.device("cpu"))
    return cache


def device(attention: str = "portable") -> DeviceCache:
    return device_cache(attention, [LayerShape(AttentionShape(2, 16, 16))] * 2, max_length=8, dtype=torch.float32)


def feed(cache: Cache, tokens: int = 1) -> None:
    """A step of every layer, in the shapes of that cache."""
    for index in range(len(cache.layers)):
        keys = cache.layers[index].keys
        heads = keys.shape[0] if type(cache.layers[index]).__name__ == "CustomLayer" else keys.shape[1]
        step = torch.randn(1, heads, tokens, keys.shape[3])
        cache.update(step, step + 1, index)


EVERY_CACHE = {
    "dynamic": dynamic,
    "static": static,
    "portable": lambda: device("portable"),
    "custom": lambda: device("custom"),
}


class CountingLayer(DynamicLayer):
    """Counts its steps in a Python number."""

    steps = 0

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: object) -> tuple[torch.Tensor, torch.Tensor]:
        self.steps += 1
        return super().update(keys, values)


def counting() -> DynamicCache:
    cache = dynamic()
    for layer in cache.layers:
        layer.__class__ = CountingLayer
        layer.steps = 0
    return cache


class Renamed(DynamicCache):
    """A subclass without state of its own."""
