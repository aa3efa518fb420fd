"""Cache classes as pytrees: mistakes are refused by name, and an entry is proved before it is used."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, StaticCache, StaticLayer

from pipeline.caches import (
    CachePytree,
    LayerPytree,
    entry_of,
    registered,
    subclass_of,
)
from pipeline.caches.dynamic import DYNAMIC_CACHE, DYNAMIC_LAYER
from runners.errors import UserError
from tests import tiny
from tests.cache_samples import (
    CountingLayer,
    Renamed,
    counting,
    dynamic,
    feed,
    nothing_changes,
)

# What is refused


def test_a_layer_without_tensors_is_refused_with_what_to_do() -> None:
    uninitialised = StaticCache(config=tiny.llama_config(), max_cache_len=8)
    with registered(), pytest.raises(UserError, match=r"StaticCache\.layers\.0.*early_initialization"):
        pytree.tree_flatten(uninitialised)
    with registered(), pytest.raises(UserError, match=r"DynamicCache\.layers\.0.*empty_dynamic_cache"):
        pytree.tree_flatten(DynamicCache(config=tiny.llama_config()))


def test_an_unknown_layer_class_is_refused_with_the_line_to_add() -> None:
    with registered(), pytest.raises(UserError, match=r"layers\.0 is a CountingLayer.*LayerPytree\(CountingLayer"):
        pytree.tree_flatten(counting())


def test_a_subclass_is_refused_with_the_line_to_add_and_that_line_works() -> None:
    with pytest.raises(UserError, match=r"registered\(subclass_of\(DynamicCache, Renamed\)\)"):
        registered(Renamed)
    cache = Renamed([(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))])
    with nothing_changes(), registered(subclass_of(DynamicCache, Renamed), DynamicCache):
        leaves, spec = pytree.tree_flatten(cache)
        assert type(pytree.tree_unflatten(leaves, spec)) is Renamed
        assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
        assert "Renamed" in pytree.treespec_dumps(spec)


class Remembering(DynamicCache):
    """A subclass with state of its own, which the parent's entry would lose."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.seen = torch.zeros(1)


def test_state_that_a_subclass_adds_is_refused_by_name() -> None:
    with registered(subclass_of(DynamicCache, Remembering)), pytest.raises(UserError, match=r"tensor seen.*leaves"):
        pytree.tree_flatten(Remembering())


def test_a_class_that_is_no_known_cache_is_refused() -> None:
    class Other(Cache):
        pass

    with pytest.raises(UserError, match=r"Other has no pytree registration\. Known classes: DynamicCache"):
        registered(Other)


def test_a_class_or_a_name_twice_in_a_scope_is_refused() -> None:
    again = "registered twice in one scope: "
    with nothing_changes(), pytest.raises(UserError, match=f"{again}DynamicCache"):
        registered(DynamicCache, DynamicCache).__enter__()
    twin = replace(entry_of(StaticCache), name=DYNAMIC_CACHE.name)
    with nothing_changes(), pytest.raises(UserError, match=rf"{again}pteline\.DynamicCache"):
        registered(DynamicCache, twin).__enter__()


# The proof of an entry


class Cloning(LayerPytree):
    """A layer row that rebuilds a layer with copies of its tensors."""

    def rebuild(self, leaves, context) -> CacheLayerMixin:
        return super().rebuild([leaf.clone() for leaf in leaves], context)


BROKEN = {
    "loses a leaf": (
        CachePytree(DynamicCache, "t.lost", (LayerPytree(DynamicLayer, ("keys",)),), dynamic),
        r"DynamicLayer holds the tensor DynamicCache\.layers\.0\.values, which its pytree entry does not name",
    ),
    "keeps a counter in the context": (
        CachePytree(
            DynamicCache, "t.counts", (LayerPytree(CountingLayer, ("keys", "values"), static=("steps",)),), counting
        ),
        "a decode step changed the context",
    ),
    "copies its tensors": (
        CachePytree(DynamicCache, "t.clones", (Cloning(DynamicLayer, ("keys", "values")),), dynamic),
        "a leaf is not the tensor that went in",
    ),
    "has a context that is no JSON": (
        CachePytree(
            DynamicCache,
            "t.json",
            (LayerPytree(DynamicLayer, ("keys", "values"), static=("is_sliding", "dtype")),),
            dynamic,
        ),
        "JSON",
    ),
    "names another class": (
        CachePytree(Renamed, "t.other", (DYNAMIC_LAYER,), dynamic),
        "its sample is a DynamicCache",
    ),
}


@pytest.mark.parametrize(("entry", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_an_entry_that_does_not_survive_the_round_trip_is_refused(
    entry: CachePytree, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DynamicLayer, "dtype", torch.float32, raising=False)  # static, and no JSON
    with nothing_changes(), pytest.raises(UserError, match=message), registered(entry):
        pass


# A class of one's own


class SumLayer(StaticLayer):
    """Fixed storage, and a running sum of all keys ``[B, K, D]`` beside it."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: object) -> tuple[torch.Tensor, torch.Tensor]:
        self.total = self.total + keys.sum(2)
        return super().update(keys, values)


class SumCache(Cache):
    """A cache that transformers does not know."""


def sums() -> SumCache:
    cache = SumCache(layers=[SumLayer(max_cache_len=4)])
    cache.early_initialization(1, 2, 4, torch.float32, torch.device("cpu"))
    cache.layers[0].total = torch.zeros(1, 2, 4)
    return cache


def test_a_class_of_ones_own_with_an_entry_of_ones_own() -> None:
    row = LayerPytree(
        SumLayer,
        leaves=("total", "cumulative_length", "keys", "values"),
        static=("max_cache_len", "batch_size", "num_heads", "k_head_dim", "v_head_dim"),
    )
    with nothing_changes(), registered(CachePytree(SumCache, "mine.SumCache", (row,), sums)):
        cache = sums()
        leaves, spec = pytree.tree_flatten(cache)
        rebuilt = pytree.tree_unflatten(leaves, spec)
        feed(rebuilt)
        assert pytree.tree_structure(rebuilt) == spec
        assert rebuilt.layers[0].total.any()
        assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
