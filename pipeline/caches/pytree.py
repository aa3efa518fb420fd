"""How a cache becomes a pytree: tensor leaves with readable key paths, and a JSON context of what never changes.

A cache is a list of layers. A :class:`CachePytree` says which layer classes a cache class may hold; the rows that say
what a layer is made of are in ``layer.py``. Nothing that changes from step to step may be in the context: two steps
must have equal tree specs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch.utils import _pytree as torch_pytree
from transformers.cache_utils import Cache, CacheLayerMixin

from pipeline.caches.layer import Layer, LayerPytree, Static, leaf_names, refuse_lost_tensors
from pipeline.caches.model_layers import ModelLayer
from pipeline.caches.reasons import WHY_NOT
from runners.errors import UserError


class Context(TypedDict):
    """What a tree spec holds of a cache: JSON, and nothing that changes while decoding."""

    cache: Static
    layers: list[Static]


@dataclass(frozen=True)
class CachePytree:
    """One cache class: its serialized name, the layers it may hold, and a small sample that proves the round trip.

    Args:
        cls: the exact class; subclasses are not covered.
        name: unique name in a saved program's tree spec.
        layers: one row a layer class that may occur in ``cache.layers``.
        sample: builds a small initialised cache.
        leaves: attributes of the cache itself that are tensors, before those of its layers.
        static: attributes of the cache itself that are fixed at build time.
        model_layers: rows of layer classes that live in a model's file.
        lazy_layer: the layer class that a cache without any layers creates at its first update.
    """

    cls: type[Cache]
    name: str
    layers: tuple[LayerPytree, ...]
    sample: Callable[[], Cache]
    leaves: tuple[str, ...] = ()
    static: tuple[str, ...] = ()
    model_layers: tuple[ModelLayer, ...] = ()
    lazy_layer: type[CacheLayerMixin] | None = None

    def named_leaves(self, cache: Cache) -> list[tuple[str, torch.Tensor]]:
        """Return ``("layers.3.keys", tensor)`` for every leaf, in flattening order.

        Raises:
            UserError: a layer's class has no row here, a layer has no tensors yet, or a tensor is no leaf and would be
                lost.
        """
        refuse_lost_tensors(cache, self.leaves, "")
        found = [(name, getattr(cache, name)) for name in self.leaves]
        for index, layer in enumerate(cache.layers):
            mine = self._row(layer, index).named_leaves(layer, f"{self.cls.__name__}.layers.{index}")
            found += [(f"layers.{index}.{name}", leaf) for name, leaf in mine]
        return found

    def context(self, cache: Cache) -> Context:
        """Return what is fixed at build time, ready for JSON."""
        layers = [self._row(layer, index).context(layer) for index, layer in enumerate(cache.layers)]
        return {"cache": {name: getattr(cache, name) for name in self.static}, "layers": layers}

    def flatten(self, cache: Cache) -> tuple[list[torch.Tensor], Context]:
        """Return the leaves and the context of a cache (the pytree protocol)."""
        return [leaf for _, leaf in self.named_leaves(cache)], self.context(cache)

    def flatten_with_keys(self, cache: Cache) -> tuple[list[tuple[torch_pytree.KeyEntry, torch.Tensor]], Context]:
        """Return the leaves with key paths, which become placeholder names such as ``cache_layers_3_keys``."""
        return [(torch_pytree.MappingKey(n), leaf) for n, leaf in self.named_leaves(cache)], self.context(cache)

    def unflatten(self, leaves: Sequence[torch.Tensor], context: Context) -> Cache:
        """Return a cache that holds exactly ``leaves``. Imports nothing, so that strict export can trace it."""
        rest = list(leaves)
        cache = object.__new__(self.cls)
        Cache.__init__(cache, layers=[])
        for name in self.leaves:
            setattr(cache, name, rest.pop(0))
        for name in self.static:
            setattr(cache, name, context["cache"][name])
        for index, layer_context in enumerate(context["layers"]):
            row, count = self._row_named(str(layer_context["type"]), index), len(leaf_names(layer_context))
            mine, rest = rest[:count], rest[count:]
            cache.layers.append(row.rebuild(mine, layer_context))
        if not cache.layers:
            cache.layer_class_to_replicate = self.lazy_layer
        return cache

    def step(self, cache: Cache) -> None:
        """Decode a step, as the proof of the round trip does."""
        for index, layer in enumerate(cache.layers):
            for step in self._row(layer, index).step:
                step(cache, index)

    def parts(self, cache: Cache) -> list[object]:
        """Return the cache and its layers: everything that has attributes of its own."""
        return [cache, *cache.layers]

    def _row(self, layer: Layer, index: int) -> LayerPytree:
        """The row of exactly this class, or of the class that it stands for in a trace."""
        for row in self._rows():
            if type(layer) in (row.cls, row.traced):
                return row
        raise self._unknown(type(layer).__name__, index)

    def _row_named(self, name: str, index: int) -> LayerPytree:
        for row in self._rows():
            if row.cls.__name__ == name:
                return row
        raise self._unknown(name, index)

    def _rows(self) -> Iterator[LayerPytree]:
        yield from self.layers
        yield from (row for layer in self.model_layers if (row := layer.row()))

    def _unknown(self, name: str, index: int) -> UserError:
        place = f"{self.cls.__name__}.layers.{index} is a {name}, which has no pytree row"
        if module := next((layer.module for layer in self.model_layers if layer.name == name), None):
            return UserError(f"{place} before its model is imported. Add: import {module}")
        if reason := WHY_NOT.get(name):
            return UserError(f"{place}: {reason}")
        known = ", ".join(row.cls.__name__ for row in self.layers)
        return UserError(
            f"{place} (known: {known}). "
            f"Add LayerPytree({name}, leaves=(...), static=(...)) to the CachePytree of {self.cls.__name__}."
        )
