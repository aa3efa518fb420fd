"""MiniMax's own cache: lightning attention keeps its states in a list beside the layers.

Legend: B batch, H query heads, K key/value heads, D head width.

A place of the model is either an attention layer, with keys and values ``[B, K, length, D]`` in ``cache.layers``, or a
linear one, with a state ``[B, H, D, D]`` in ``cache.linear_cache``. The other list holds nothing there: an empty list,
or a layer without tensors. A state of zeros is the state before the first token, and without one the model computes in
blocks, which is another graph: a cache starts from zeros (``rewind``), never from nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache, DynamicLayer
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from pipeline.caches.dynamic import DYNAMIC_LAYER
from pipeline.caches.layer import Static, leaf_names, refuse_lost_tensors
from pipeline.caches.pytree import CachePytree, Context
from runners.errors import UserError

_STATES = "linear_cache"


@dataclass(frozen=True)
class MiniMaxPytree(CachePytree):
    """The leaves of each place in turn: ``layers.0.keys``, ``layers.0.values``, ``linear_cache.1``."""

    def named_leaves(self, cache: Cache) -> list[tuple[str, torch.Tensor]]:
        """Return the keys and values, or the state, of every place.

        Raises:
            UserError: a place has no tensors yet, or a tensor is no leaf and would be lost.
        """
        refuse_lost_tensors(cache, (_STATES,), "")
        self._refuse_nothing(cache)
        found: list[tuple[str, torch.Tensor]] = []
        for index in range(len(cache)):
            if (state := _state(cache, index)) is not None:
                found.append((f"{_STATES}.{index}", state))
                continue
            mine = self._row(cache.layers[index], index).named_leaves(cache.layers[index], self._place(index))
            found += [(f"layers.{index}.{name}", leaf) for name, leaf in mine]
        return found

    def context(self, cache: Cache) -> Context:
        """Return the kind of every place, ready for JSON."""
        return {"cache": {}, "layers": [self._context(cache, index) for index in range(len(cache))]}

    def unflatten(self, leaves: Sequence[torch.Tensor], context: Context) -> Cache:
        """Return a cache that holds exactly ``leaves``."""
        cache, rest = object.__new__(self.cls), list(leaves)
        Cache.__init__(cache, layers=[])
        cache.layer_class_to_replicate, cache.linear_cache = self.lazy_layer, []
        for index, place in enumerate(context["layers"]):
            mine, rest = rest[: len(leaf_names(place))], rest[len(leaf_names(place)) :]
            if place["type"] == _STATES:
                cache.set_linear_cache(index, mine[0])
                continue
            while len(cache.layers) < index:  # at the places of linear layers, as update() adds them
                cache.layers.append(DynamicLayer())
            cache.layers.append(self._row_named(str(place["type"]), index).rebuild(mine, place))
        return cache

    def step(self, cache: Cache) -> None:
        """Decode a step: a token for each attention layer, and a successor for each state."""
        for index in range(len(cache)):
            if (state := _state(cache, index)) is not None:
                cache.set_linear_cache(index, torch.zeros_like(state))
                continue
            for step in self._row(cache.layers[index], index).step:
                step(cache, index)

    def _context(self, cache: Cache, index: int) -> Static:
        if _state(cache, index) is not None:
            return {"type": _STATES, "leaves": [f"{_STATES}.{index}"]}
        return self._row(cache.layers[index], index).context(cache.layers[index])

    def _place(self, index: int) -> str:
        return f"{self.cls.__name__}.layers.{index}"

    def _refuse_nothing(self, cache: Cache) -> None:
        if not len(cache):
            raise UserError(
                f"{self.cls.__name__} holds nothing yet, and a program that starts without states differs from one "
                "that goes on. Run the model once on one token and call pipeline.caches.rewind(cache)."
            )


def _state(cache: Cache, index: int) -> torch.Tensor | None:
    """The state ``[B, H, D, D]`` of a linear place; None at a place of attention."""
    states = cache.linear_cache
    return states[index] if index < len(states) and isinstance(states[index], torch.Tensor) else None


def _sample() -> MiniMaxCache:
    """Attention at both ends and states between: three tokens in."""
    cache = MiniMaxCache()
    for index in (0, 3):
        cache.update(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4), index)
    for index in (1, 2):
        cache.set_linear_cache(index, torch.zeros(1, 2, 4, 4))
    return cache


MINIMAX_CACHE = MiniMaxPytree(
    MiniMaxCache, "pteline.MiniMaxCache", (DYNAMIC_LAYER,), _sample, leaves=(_STATES,), lazy_layer=DynamicLayer
)
