"""How a cache becomes a pytree: tensor leaves with readable key paths, and a JSON context of what never changes.

Legend: B batch, K key/value heads, L cache length, D head width.

A cache is a list of layers. A :class:`LayerPytree` says which attributes of a layer class are tensors that change while
decoding (the leaves) and which are fixed at build time (the context). A :class:`CachePytree` says which layer classes a
cache class may hold. Nothing that changes from step to step may be in the context: two steps must have equal tree
specs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from pydantic import JsonValue
from torch.utils import _pytree as torch_pytree
from transformers.cache_utils import Cache, CacheLayerMixin

from runners.errors import UserError

Static = dict[str, JsonValue]


class Context(TypedDict):
    """What a tree spec holds of a cache: JSON, and nothing that changes while decoding."""

    cache: Static
    layers: list[Static]


@dataclass(frozen=True)
class LayerPytree:
    """One layer class: names of its leaves (tensors that change) and of its static attributes (JSON values)."""

    cls: type[CacheLayerMixin]
    leaves: tuple[str, ...]  # in flattening order
    static: tuple[str, ...] = ()

    def context(self, layer: CacheLayerMixin) -> Static:
        """Return what is fixed at build time, ready for JSON."""
        return {"type": self.cls.__name__, "device": str(layer.device)} | {n: getattr(layer, n) for n in self.static}

    def rebuild(self, leaves: Sequence[torch.Tensor], context: Mapping[str, JsonValue]) -> CacheLayerMixin:
        """Return a layer that holds exactly these tensors; its constructor, which would allocate, does not run."""
        layer = object.__new__(self.cls)
        for name, leaf in zip(self.leaves, leaves, strict=True):
            setattr(layer, name, leaf)
        for name in self.static:
            setattr(layer, name, context[name])
        layer.device = torch.device(str(context["device"]))
        layer.is_initialized = True
        return layer


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
        lazy_layer: the layer class that a cache without any layers creates at its first update.
    """

    cls: type[Cache]
    name: str
    layers: tuple[LayerPytree, ...]
    sample: Callable[[], Cache]
    leaves: tuple[str, ...] = ()
    static: tuple[str, ...] = ()
    lazy_layer: type[CacheLayerMixin] | None = None

    def named_leaves(self, cache: Cache) -> list[tuple[str, torch.Tensor]]:
        """Return ``("layers.3.keys", tensor)`` for every leaf, in flattening order.

        Raises:
            UserError: a layer's class has no row here, a layer has no tensors yet, or a tensor is no leaf and would be
                lost.
        """
        found = _leaves(cache, self.leaves, "")
        for index, layer in enumerate(cache.layers):
            row = self._row(type(layer).__name__, index)
            if not layer.is_initialized:
                raise UserError(
                    f"{self.cls.__name__}.layers.{index} ({type(layer).__name__}) has no tensors yet, so it has "
                    "nothing to trace. Call cache.early_initialization(...) (static) or use "
                    "pipeline.caches.empty_dynamic_cache (dynamic) before exporting."
                )
            found += _leaves(layer, row.leaves, f"layers.{index}.")
        return found

    def flatten(self, cache: Cache) -> tuple[list[torch.Tensor], Context]:
        """Return the leaves and the context of a cache (the pytree protocol)."""
        return [leaf for _, leaf in self.named_leaves(cache)], self._context(cache)

    def flatten_with_keys(self, cache: Cache) -> tuple[list[tuple[torch_pytree.KeyEntry, torch.Tensor]], Context]:
        """Return the leaves with key paths, which become placeholder names such as ``cache_layers_3_keys``."""
        return [(torch_pytree.MappingKey(n), leaf) for n, leaf in self.named_leaves(cache)], self._context(cache)

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
            row = self._row(str(layer_context["type"]), index)
            mine, rest = rest[: len(row.leaves)], rest[len(row.leaves) :]
            cache.layers.append(row.rebuild(mine, layer_context))
        if not cache.layers:
            cache.layer_class_to_replicate = self.lazy_layer
        return cache

    def _context(self, cache: Cache) -> Context:
        layers = [self._row(type(layer).__name__, i).context(layer) for i, layer in enumerate(cache.layers)]
        return {"cache": {name: getattr(cache, name) for name in self.static}, "layers": layers}

    def _row(self, name: str, index: int) -> LayerPytree:
        for row in self.layers:
            if row.cls.__name__ == name:
                return row
        known = ", ".join(row.cls.__name__ for row in self.layers)
        raise UserError(
            f"{self.cls.__name__}.layers.{index} is a {name}, which has no pytree row (known: {known}). "
            f"Add LayerPytree({name}, leaves=(...), static=(...)) to the CachePytree of {self.cls.__name__}."
        )


def prove_round_trip(entry: CachePytree) -> None:
    """Flatten and rebuild a sample, then decode one step: same type, layers, tensors (identity), attributes and spec.

    Raises:
        UserError: a leaf or an attribute is lost or changed, or the context changes while decoding.
    """
    cache = entry.sample()
    _require(type(cache) is entry.cls, entry, f"its sample is a {type(cache).__name__}")
    leaves, context = entry.flatten(cache)
    _require(_is_json(context), entry, f"the context {context} is not JSON, which a saved program needs")
    rebuilt = entry.unflatten(leaves, context)
    _require(type(rebuilt) is entry.cls, entry, "the rebuilt cache has another type")
    _require([type(x) for x in rebuilt.layers] == [type(x) for x in cache.layers], entry, "the layers' types changed")
    again, context_again = entry.flatten(rebuilt)
    _require(all(a is b for a, b in zip(leaves, again, strict=True)), entry, "a leaf is not the tensor that went in")
    _require(context == context_again, entry, "the context changed")
    for before, after in zip([cache, *cache.layers], [rebuilt, *rebuilt.layers], strict=True):
        lost = _attributes(before) - _attributes(after)
        _require(not lost, entry, f"{type(before).__name__} lost the attributes {sorted(lost)}")
    for index, layer in enumerate(rebuilt.layers):
        step = [torch.zeros(t.shape[0], t.shape[1], 1, t.shape[3]) for t in (layer.keys, layer.values)]
        rebuilt.update(*step, index)
    _require(
        entry.flatten(rebuilt)[1] == context, entry, "a decode step changed the context: make that value a tensor leaf"
    )


def _leaves(owner: Cache | CacheLayerMixin, names: Sequence[str], prefix: str) -> list[tuple[str, torch.Tensor]]:
    """The named tensors of a cache or a layer; it may hold no other, such as the state that a subclass adds."""
    for name, value in vars(owner).items():
        if isinstance(value, torch.Tensor) and name not in names:
            raise UserError(
                f"{type(owner).__name__} holds the tensor {prefix}{name}, which its pytree entry does not name, so it "
                f'would be lost. Add "{name}" to the leaves of the entry.'
            )
    return [(f"{prefix}{name}", getattr(owner, name)) for name in names]


def _is_json(context: Context) -> bool:
    """Whether the context is read back from JSON as it was written: a tuple, for one, comes back as a list."""
    try:
        return bool(json.loads(json.dumps(context)) == context)
    except TypeError:
        return False


def _attributes(thing: object) -> set[str]:
    return {name for name, value in vars(thing).items() if value is not None}


def _require(condition: bool, entry: CachePytree, problem: str) -> None:
    if not condition:
        raise UserError(f"the pytree registration of {entry.cls.__name__} does not survive a round trip: {problem}.")
