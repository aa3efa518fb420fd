"""Cache classes as pytrees: the scope leaves no trace, nothing of a cache is lost, and mistakes are refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.fx._pytree as fx_pytree
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, StaticCache, StaticLayer

from pipeline.caches import (
    AttentionShape,
    CachePytree,
    DeviceCache,
    LayerPytree,
    LayerShape,
    device_cache,
    empty_dynamic_cache,
    entry_of,
    registered,
    subclass_of,
)
from pipeline.caches.dynamic import DYNAMIC_CACHE, DYNAMIC_LAYER
from runners.errors import UserError
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
        heads = keys.shape[2] if type(cache.layers[index]).__name__ == "CustomLayer" else keys.shape[1]
        step = torch.randn(1, heads, tokens, keys.shape[3])
        cache.update(step, step + 1, index)


EVERY_CACHE = {
    "dynamic": dynamic,
    "static": static,
    "portable": lambda: device("portable"),
    "custom": lambda: device("custom"),
}


# The scope


def test_inside_the_scope_a_cache_is_a_node_and_afterwards_a_leaf_again() -> None:
    cache = dynamic()
    with nothing_changes():
        with registered(DynamicCache):
            leaves = pytree.tree_leaves(cache)
        assert [leaf.shape for leaf in leaves] == [(1, 2, 3, 4)] * 4
        assert pytree.tree_leaves(cache) == [cache]


def test_without_an_argument_every_known_class_is_registered() -> None:
    with registered():
        assert {DynamicCache, StaticCache, DeviceCache} <= set(pytree.SUPPORTED_NODES)
        assert {DynamicCache, StaticCache, DeviceCache} <= set(fx_pytree.SUPPORTED_NODES)


def test_only_the_named_classes_are_registered() -> None:
    with registered(StaticCache):
        assert StaticCache in pytree.SUPPORTED_NODES
        assert DynamicCache not in pytree.SUPPORTED_NODES


def test_an_exception_leaves_the_registries_as_they_were() -> None:
    with nothing_changes(), pytest.raises(RuntimeError, match="inside"), registered():
        raise RuntimeError("inside")


def test_scopes_nest_and_the_inner_one_gives_back_the_outer_ones_nodes() -> None:
    cache = dynamic()
    with nothing_changes(), registered():
        with nothing_changes(), registered(DynamicCache):
            assert len(pytree.tree_leaves(cache)) == 4
        assert len(pytree.tree_leaves(cache)) == 4


def test_entering_the_scope_warns_of_nothing() -> None:
    with foreign(DynamicCache, "theirs.DynamicCache", with_fx=True), warnings.catch_warnings():
        warnings.simplefilter("error")
        with registered(), registered():
            pass


@pytest.mark.parametrize("name", ["theirs.DynamicCache", "pteline.DynamicCache", None])
@pytest.mark.parametrize("with_fx", [True, False])
def test_another_librarys_registration_is_put_back(name: str | None, with_fx: bool) -> None:
    cache = dynamic()
    with foreign(DynamicCache, name, with_fx=with_fx), nothing_changes():
        with registered():
            assert pytree.tree_structure(cache).context != "theirs"
            assert len(fx_pytree.tree_flatten_spec(cache, pytree.tree_structure(cache))) == 4
        assert pytree.tree_structure(cache).context == "theirs"


def test_another_librarys_registration_is_put_back_after_an_exception_in_a_nested_scope() -> None:
    with foreign(DynamicCache, "theirs.DynamicCache", with_fx=True), nothing_changes():
        with pytest.raises(KeyError), registered(), registered(DynamicCache):
            raise KeyError
        assert pytree.tree_structure(dynamic()).context == "theirs"


def test_transformers_own_registration_is_put_back() -> None:
    from transformers.integrations.executorch import register_dynamic_cache_export_support

    before = snapshot()
    try:
        register_dynamic_cache_export_support()
        with nothing_changes(), registered():
            assert len(pytree.tree_leaves(dynamic())) == 4
    finally:
        for registry, content in zip(REGISTRIES, before, strict=True):
            registry.clear()
            registry.update(content)


def test_importing_registers_nothing() -> None:
    code = (
        "import torch, transformers.cache_utils as c, torch.utils._pytree as p, torch.fx._pytree as f\n"
        "import pipeline.caches, pipeline.export\n"
        "classes = {x for x in vars(c).values() if isinstance(x, type) and issubclass(x, c.Cache)}\n"
        "classes.add(pipeline.caches.DeviceCache)\n"
        "print(len(classes), [x for x in classes for r in (p.SUPPORTED_NODES, f.SUPPORTED_NODES) if x in r])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    number, _, found = done.stdout.strip().partition(" ")
    assert int(number) > 3
    assert found == "[]"


# What a cache becomes


@pytest.mark.parametrize("make", EVERY_CACHE.values(), ids=EVERY_CACHE.keys())
def test_a_rebuilt_cache_has_the_same_type_layers_tensors_and_attributes(make) -> None:
    cache = make()
    with registered():
        leaves, spec = pytree.tree_flatten(cache)
        rebuilt = pytree.tree_unflatten(leaves, spec)
        again = pytree.tree_leaves(rebuilt)
    assert type(rebuilt) is type(cache)
    assert [type(layer) for layer in rebuilt.layers] == [type(layer) for layer in cache.layers]
    assert all(a is b for a, b in zip(leaves, again, strict=True))
    for before, after in zip(cache.layers, rebuilt.layers, strict=True):
        assert vars(before).keys() == vars(after).keys()
        assert {k: v for k, v in vars(before).items() if not isinstance(v, torch.Tensor)} == {
            k: v for k, v in vars(after).items() if not isinstance(v, torch.Tensor)
        }


@pytest.mark.parametrize("make", EVERY_CACHE.values(), ids=EVERY_CACHE.keys())
def test_the_spec_is_the_same_after_a_step(make) -> None:
    cache = make()
    with registered():
        before = pytree.tree_structure(cache)
        feed(cache)
        assert pytree.tree_structure(cache) == before


@pytest.mark.parametrize("make", EVERY_CACHE.values(), ids=EVERY_CACHE.keys())
def test_the_spec_survives_json(make) -> None:
    with registered():
        spec = pytree.tree_structure(make())
        text = pytree.treespec_dumps(spec)
        json.loads(text)
        assert pytree.treespec_loads(text) == spec
        assert json.loads(json.dumps(spec.context)) == spec.context


@pytest.mark.parametrize("make", EVERY_CACHE.values(), ids=EVERY_CACHE.keys())
def test_every_tensor_that_a_step_changes_is_a_leaf(make) -> None:
    """A rebuilt cache and the original go on alike: nothing that matters lies outside leaves and context."""
    cache = make()
    feed(cache, tokens=2)
    with registered():
        leaves, spec = pytree.tree_flatten(cache)
        rebuilt = pytree.tree_unflatten([leaf.clone() for leaf in leaves], spec)
        for one in (cache, rebuilt):
            torch.manual_seed(1)
            if isinstance(one, DeviceCache):
                one.position = torch.tensor([2])
            feed(one)
        pairs = list(zip(pytree.tree_leaves(cache), pytree.tree_leaves(rebuilt), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not any(torch.equal(old, new) for old, new in zip(leaves, [b for _, b in pairs], strict=True)) or isinstance(
        cache, DeviceCache | StaticCache
    )


def test_leaves_have_readable_paths() -> None:
    with registered():
        paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path({"cache": device()})[0]]
    assert paths == [
        "['cache']['position']",
        "['cache']['layers.0.keys']",
        "['cache']['layers.0.values']",
        "['cache']['layers.1.keys']",
        "['cache']['layers.1.values']",
    ]


def test_placeholders_are_named_by_the_paths() -> None:
    class Reader(torch.nn.Module):
        def forward(self, cache: DynamicCache) -> torch.Tensor:
            return cache.layers[0].keys + cache.layers[1].values

    with registered():
        program = torch.export.export(Reader(), (), {"cache": dynamic()}, strict=False)
    names = [node.name for node in program.graph.nodes if node.op == "placeholder"]
    assert names == [f"cache_layers_{i}_{what}" for i in (0, 1) for what in ("keys", "values")]


def test_the_fx_spec_flattens_alike_and_notices_another_number_of_layers() -> None:
    with registered():
        spec = pytree.tree_structure(dynamic())
        cache = dynamic()
        assert all(
            a is b for a, b in zip(fx_pytree.tree_flatten_spec(cache, spec), pytree.tree_leaves(cache), strict=True)
        )
        fits = fx_pytree.SUPPORTED_NODES_EXACT_MATCH[DynamicCache]
        assert fits(cache, spec)
        assert not fits(dynamic(layers=3), spec)


def test_a_dynamic_cache_without_layers_grows_after_the_round_trip() -> None:
    with registered():
        leaves, spec = pytree.tree_flatten(DynamicCache())
        assert leaves == []
        rebuilt = pytree.tree_unflatten(leaves, spec)
    step = torch.ones(1, 2, 1, 4)
    rebuilt.update(step, step, 0)
    assert torch.equal(rebuilt.layers[0].keys, step)


def test_an_empty_dynamic_cache_has_its_leaves_from_the_start() -> None:
    cache = empty_dynamic_cache(tiny.llama_config())
    with registered():
        leaves, before = pytree.tree_flatten(cache)
        assert [leaf.shape for leaf in leaves] == [(1, 2, 0, 16)] * 4
        model, ids = tiny.llama(), torch.tensor([[5, 6, 7]])
        logits = model(input_ids=ids, cache=cache).logits
        assert pytree.tree_structure(cache) == before
    assert torch.equal(logits, model(input_ids=ids).logits)


@pytest.mark.parametrize("attention", ["custom", "portable"])
def test_a_device_cache_writes_at_its_position_and_nowhere_else(attention: str) -> None:
    cache = device(attention)
    cache.position = torch.tensor([3])
    step = torch.randn(1, 2, 2, 16)
    cache.update(step, -step, 0)
    cache.update(step, -step, 1)
    for layer in cache.layers:
        keys = layer.keys.transpose(1, 2) if attention == "custom" else layer.keys
        assert torch.equal(keys[:, :, 3:5], step)
        assert not keys[:, :, :3].any()
        assert not keys[:, :, 5:].any()


def test_a_device_cache_reads_its_position_anew_in_each_call() -> None:
    cache = device("custom")
    for position in (0, 5):
        cache.position = torch.tensor([position])
        assert cache.get_query_offset() == position
        feed(cache)
        assert cache.layers[1].keys[0, position].any()


# What is refused


def test_a_layer_without_tensors_is_refused_with_what_to_do() -> None:
    uninitialised = StaticCache(config=tiny.llama_config(), max_cache_len=8)
    with registered(), pytest.raises(UserError, match=r"StaticCache\.layers\.0.*early_initialization"):
        pytree.tree_flatten(uninitialised)
    with registered(), pytest.raises(UserError, match=r"DynamicCache\.layers\.0.*empty_dynamic_cache"):
        pytree.tree_flatten(DynamicCache(config=tiny.llama_config()))


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


def test_an_unknown_layer_class_is_refused_with_the_line_to_add() -> None:
    with registered(), pytest.raises(UserError, match=r"layers\.0 is a CountingLayer.*LayerPytree\(CountingLayer"):
        pytree.tree_flatten(counting())


class Renamed(DynamicCache):
    """A subclass without state of its own."""


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
