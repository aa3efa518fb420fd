"""Cache classes as pytrees: nothing of a cache is lost on its way through leaves and context."""

from __future__ import annotations

import json

import pytest
import torch
import torch.fx._pytree as fx_pytree
from torch.utils import _pytree as pytree
from transformers.cache_utils import DynamicCache, StaticCache

from pipeline.caches import (
    DeviceCache,
    empty_dynamic_cache,
    registered,
)
from tests import tiny
from tests.cache_samples import (
    EVERY_CACHE,
    device,
    dynamic,
    feed,
)


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
        keys = layer.keys.permute(2, 0, 1, 3) if attention == "custom" else layer.keys
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
