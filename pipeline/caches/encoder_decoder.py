"""Encoder-decoder caches: one cache for self-attention, one for cross-attention.

``is_updated``, a Python flag a layer, is set by the step that computes the encoder's keys and values. With the flag
unset a step computes them, with it set a step reads them: two graphs. So a cache is a pytree from the moment that they
are in, and every flag is true in it; the step that computes them takes no cache and returns one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from pipeline.caches.dynamic import DYNAMIC_CACHE
from pipeline.caches.layer import leaf_names, refuse_lost_tensors
from pipeline.caches.pytree import CachePytree, Context
from pipeline.caches.static import STATIC_CACHE
from runners.errors import UserError

_PARTS = ("self_attention_cache", "cross_attention_cache")


class PairContext(TypedDict):
    """The contexts of both caches, and the names of their classes."""

    types: list[str]
    contexts: list[Context]


@dataclass(frozen=True)
class EncoderDecoderPytree(CachePytree):
    """The leaves of both caches in turn: ``self_attention_cache.layers.3.keys``.

    Args:
        inner: entries of the classes that either part may have.
    """

    inner: tuple[CachePytree, ...] = ()

    def named_leaves(self, cache: Cache) -> list[tuple[str, torch.Tensor]]:
        """Return the leaves of both caches.

        Raises:
            UserError: the encoder's keys are not in yet, or a part cannot be flattened.
        """
        self._require_encoded(cache)
        refuse_lost_tensors(cache, (), "")
        return [
            (f"{part}.{name}", leaf)
            for part in _PARTS
            for name, leaf in self._inner(cache, part).named_leaves(getattr(cache, part))
        ]

    def context(self, cache: Cache) -> PairContext:  # type: ignore[override]
        """Return the contexts of both caches."""
        return {
            "types": [type(getattr(cache, part)).__name__ for part in _PARTS],
            "contexts": [self._inner(cache, part).context(getattr(cache, part)) for part in _PARTS],
        }

    def unflatten(self, leaves: Sequence[torch.Tensor], context: PairContext) -> Cache:  # type: ignore[override]
        """Return a cache that holds exactly ``leaves``, with every flag set."""
        cache, rest = object.__new__(self.cls), list(leaves)
        for part, name, inner in zip(_PARTS, context["types"], context["contexts"], strict=True):
            entry = self._inner_named(name, part)
            count = len(entry.leaves) + sum(len(leaf_names(layer)) for layer in inner["layers"])
            setattr(cache, part, entry.unflatten(rest[:count], inner))
            rest = rest[count:]
        cache.is_updated = dict.fromkeys(range(len(cache.cross_attention_cache)), True)
        return cache

    def step(self, cache: Cache) -> None:
        """Decode a step: the cross-attention cache is only read."""
        self._inner(cache, "self_attention_cache").step(cache.self_attention_cache)

    def parts(self, cache: Cache) -> list[object]:
        """Return everything that has attributes of its own."""
        return [cache] + [x for part in _PARTS for x in self._inner(cache, part).parts(getattr(cache, part))]

    def _require_encoded(self, cache: Cache) -> None:
        count = len(cache.cross_attention_cache)
        if count == 0 or not all(cache.is_updated.get(index) for index in range(count)):
            raise UserError(
                f"{self.cls.__name__}.cross_attention_cache does not hold the encoder's keys yet, and the step that "
                "computes them is another graph than those that read them. Run the model once with the encoder's "
                "output and this cache; pipeline.caches.rewind(cache) then takes the decoder back to its start."
            )

    def _inner(self, cache: Cache, part: str) -> CachePytree:
        return self._inner_named(type(getattr(cache, part)).__name__, part)

    def _inner_named(self, name: str, part: str) -> CachePytree:
        for entry in self.inner:
            if entry.cls.__name__ == name:
                return entry
        known = ", ".join(entry.cls.__name__ for entry in self.inner)
        raise UserError(
            f"{self.cls.__name__}.{part} is a {name}, which has no entry there (known: {known}). Add one: "
            f"registered(dataclasses.replace(entry_of({self.cls.__name__}), inner=(..., entry of {name})))."
        )


def _sample() -> EncoderDecoderCache:
    decoder, encoder = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 4)
    return EncoderDecoderCache(DynamicCache([(decoder, decoder.clone())] * 2), DynamicCache([(encoder, encoder)] * 2))


ENCODER_DECODER_CACHE = EncoderDecoderPytree(
    EncoderDecoderCache, "pteline.EncoderDecoderCache", (), _sample, inner=(DYNAMIC_CACHE, STATIC_CACHE)
)
