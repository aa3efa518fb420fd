"""Every layer class through a round trip, and what cannot be flattened is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import transformers as tf
from torch.utils import _pytree as pytree
from transformers.cache_utils import (
    Cache,
    DFlashCache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
    MtpCache,
    QuantizedCache,
    StaticCache,
    StaticSlidingWindowLayer,
)
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as minimax_m3

from pipeline.caches import KNOWN, CachePytree, empty_dynamic_cache, entry_of, registered, rewind
from pipeline.caches.dynamic import DYNAMIC_CACHE, DYNAMIC_LAYER, DYNAMIC_SLIDING_LAYER
from pipeline.caches.encoder_decoder import ENCODER_DECODER_CACHE
from pipeline.caches.linear import LINEAR_LAYER
from pipeline.caches.proof import prove_round_trip
from pipeline.caches.static import STATIC_CACHE
from pipeline.caches.window import TracedDynamicSlidingWindowLayer, TracedStaticSlidingWindowLayer
from runners.errors import UserError

ENTRIES = {entry.cls.__name__: entry for entry in KNOWN if entry.cls.__name__ != "DeviceCache"}
TOKENS = torch.arange(1.0, 61.0).reshape(1, 1, 60, 1)


def paths(cache: Cache) -> list[str]:
    with registered():
        return [path[-1].key for path, _ in pytree.tree_flatten_with_path(cache)[0]]


def sliding(window: int = 4) -> dict[str, Cache]:
    """A static and a dynamic cache of one windowed layer, without tokens."""
    config = tf.MistralConfig(num_hidden_layers=1, sliding_window=window, num_attention_heads=1, hidden_size=1)
    static = StaticCache(config, max_cache_len=60)
    static.early_initialization(1, 1, 1, torch.float32, torch.device("cpu"))
    return {"static": static, "dynamic": DynamicCache(config=config)}


def feed(cache: Cache, at: int, tokens: int) -> None:
    part = TOKENS[:, :, at : at + tokens]
    cache.update(part, -part, 0)


# The round trip


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES.keys())
def test_every_attribute_of_every_layer_is_rebuilt(entry: CachePytree) -> None:
    cache = entry.sample()
    leaves, context = entry.flatten(cache)
    rebuilt = entry.unflatten(leaves, json.loads(json.dumps(context)))
    for before, after in zip(entry.parts(cache)[1:], entry.parts(rebuilt)[1:], strict=True):
        assert type(before) is type(after)
        assert vars(before).keys() - {"layer_class_to_replicate"} == vars(after).keys() - {"layer_class_to_replicate"}
        for name, value in vars(before).items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, getattr(after, name)), name
            elif not isinstance(value, list | tuple | dict):
                assert value == getattr(after, name), (type(before).__name__, name)
            elif isinstance(value, dict):
                assert all(getattr(after, name)[k] is v or getattr(after, name)[k] == v for k, v in value.items())


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_samples_hold_every_layer_class_that_an_entry_knows(kind: str) -> None:
    entry = {"static": STATIC_CACHE, "dynamic": DYNAMIC_CACHE}[kind]
    assert [type(layer) for layer in entry.sample().layers] == [row.cls for row in entry.layers]


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_the_count_of_a_window_is_a_leaf_and_a_number_again_afterwards(kind: str) -> None:
    cache = sliding()[kind]
    feed(cache, 0, 3)
    with registered():
        spec = pytree.tree_structure(cache)
        for at in range(3, 9):
            feed(cache, at, 1)
            leaves, again = pytree.tree_flatten(cache)
            assert again == spec
            assert int(leaves[0]) == at + 1
            cache = pytree.tree_unflatten(leaves, spec)
            assert cache.get_seq_length() == at + 1
            assert type(cache.get_seq_length()) is int


def test_states_have_paths_by_place() -> None:
    cache = DYNAMIC_CACHE.sample()
    cache.layers = cache.layers[3:4]
    names = ["conv_states.0", "conv_states.1", "recurrent_states.0", "recurrent_states.1"]
    assert paths(cache) == [f"layers.0.{name}" for name in names]


def test_a_layer_that_has_only_conv_states_has_only_their_leaves() -> None:
    layer = LinearAttentionLayer()
    layer.update_conv_state(torch.ones(1, 2, 5), conv_kernel_size=3)
    cache = DynamicCache()
    cache.layers = [layer]
    assert paths(cache) == ["layers.0.conv_states.0"]
    with registered():
        leaves, spec = pytree.tree_flatten(cache)
        rebuilt = pytree.tree_unflatten(leaves, spec)
    assert rebuilt.layers[0].recurrent_states == {0: None}
    assert rebuilt.layers[0].is_recurrent_states_initialized == {0: False}
    assert rebuilt.layers[0].is_croppable


def test_both_parts_of_an_encoder_decoder_cache_are_leaves() -> None:
    cache = ENCODER_DECODER_CACHE.sample()
    parts = ("self_attention_cache", "cross_attention_cache")
    assert paths(cache) == [f"{p}.layers.{i}.{w}" for p in parts for i in (0, 1) for w in ("keys", "values")]


@pytest.mark.parametrize(
    ("parent", "layer"),
    [
        (DynamicCache, minimax_m3.MiniMaxM3VLSparseCacheLayer),
        (StaticCache, minimax_m3.MiniMaxM3VLSparseStaticCacheLayer),
    ],
)
def test_a_layer_of_a_model_file_survives_the_round_trip(parent: type[Cache], layer: type) -> None:
    def sample() -> Cache:
        cache = entry_of(parent).sample()
        cache.layers = [layer(max_cache_len=8)]
        cache.layers[0].update(torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4))
        cache.layers[0].update_index(torch.ones(1, 1, 3, 2))
        return cache

    prove_round_trip(replace(entry_of(parent), sample=sample))


# Windows in a trace


def traced(kind: str, window: int) -> Cache:
    """The same cache with the layer that stands for transformers' own in a trace."""
    cache = sliding(window)[kind]
    old = cache.layers[0]
    cls = TracedStaticSlidingWindowLayer if kind == "static" else TracedDynamicSlidingWindowLayer
    new = cls(max_cache_len=60, sliding_window=window)
    empty = TOKENS[:, :, :0]
    new.lazy_initialization(empty, empty)
    if kind == "dynamic":
        new.keys = new.values = empty
        new.cumulative_length = torch.tensor(0)
    cache.layers = [new]
    assert isinstance(new, type(old))
    return cache


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("calls", [(1,) * 12, (5, 1, 1, 5, 1), (3, 1, 1, 1), (4, 4, 4), (9, 2), (2, 9, 1)])
def test_a_traced_window_shows_each_query_the_same_tokens(kind: str, calls: tuple[int, ...]) -> None:
    """What a causal window lets a query see, by value: the same as in transformers' own layer."""
    window, at = 4, 0
    ours, theirs = traced(kind, window), sliding(window)[kind]
    for tokens in calls:
        seen = []
        for cache in (ours, theirs):
            length, offset = cache.get_mask_sizes(tokens, 0)
            start = int(cache.get_seq_length())
            part = TOKENS[:, :, at : at + tokens]
            keys, values = cache.update(part, -part, 0)
            assert keys.shape[2] == length
            positions = torch.arange(length) + offset
            queries = torch.arange(tokens) + start
            visible = [(positions <= q) & (positions > q - window) for q in queries]
            seen.append([(keys[0, 0, v, 0].tolist(), values[0, 0, v, 0].tolist()) for v in visible])
        assert seen[0] == seen[1]
        assert all(
            keys == [q + 1.0 for q in range(max(0, at + i - 3), at + i + 1)] for i, (keys, _) in enumerate(seen[0])
        )
        at += tokens
        assert int(ours.get_seq_length()) == theirs.get_seq_length() == at
        stored = min(at, theirs.layers[0].keys.shape[2])
        assert torch.equal(ours.layers[0].keys[:, :, :stored], theirs.layers[0].keys[:, :, :stored])


def test_a_length_that_was_read_before_an_update_stays_as_it_was() -> None:
    cache = traced("static", 4)
    before = cache.get_seq_length()
    feed(cache, 0, 3)
    assert int(before) == 0


# Rewinding


@pytest.mark.parametrize("entry", [DYNAMIC_CACHE, STATIC_CACHE], ids=["dynamic", "static"])
def test_a_rewound_cache_keeps_its_spec_and_holds_nothing(entry: CachePytree) -> None:
    cache = entry.sample()
    with registered():
        before = pytree.tree_structure(cache)
        leaves, spec = pytree.tree_flatten(rewind(cache))
    assert spec == before
    assert leaves
    assert not any(leaf.any() for leaf in leaves)
    assert cache.get_seq_length() == 0


def test_the_encoders_keys_outlast_a_rewind() -> None:
    cache = rewind(ENCODER_DECODER_CACHE.sample())
    assert cache.get_seq_length() == 0
    assert cache.cross_attention_cache.get_seq_length() == 5
    assert all(cache.is_updated.values())


def test_scales_that_a_prompt_chose_are_no_start() -> None:
    cache = entry_of(QuantizedCache).sample()
    with pytest.raises(UserError, match=r"QuantizedCache\.layers\.0 \(Fp8QuantizedLayer\) chose its scales"):
        rewind(cache)


# What is refused


def test_a_linear_layer_without_a_state_is_refused_with_what_to_do() -> None:
    cache = DYNAMIC_CACHE.sample()
    cache.reset()
    cache.layers = cache.layers[3:4]
    with registered(), pytest.raises(UserError, match=r"layers\.0 \(LinearAttentionLayer\) has no previous.*rewind"):
        pytree.tree_flatten(cache)


def test_a_cache_that_records_its_past_is_refused() -> None:
    cache = DYNAMIC_CACHE.sample()
    cache.activate_past_recording()
    with registered(), pytest.raises(UserError, match=r"\(DynamicSlidingWindowLayer\) has record_past=True"):
        pytree.tree_flatten(cache)


def test_an_encoder_decoder_cache_without_the_encoders_keys_is_refused() -> None:
    cache = ENCODER_DECODER_CACHE.sample()
    cache.is_updated[1] = False
    with registered(), pytest.raises(UserError, match=r"EncoderDecoderCache.*does not hold the encoder's keys yet"):
        pytree.tree_flatten(cache)
    with registered(), pytest.raises(UserError, match="encoder's keys"):
        pytree.tree_flatten(EncoderDecoderCache(DynamicCache(), DynamicCache()))


def test_an_encoder_decoder_cache_of_unknown_parts_is_refused_with_the_line_to_add() -> None:
    cache = ENCODER_DECODER_CACHE.sample()
    cache.self_attention_cache.__class__ = MtpCache
    with registered(), pytest.raises(UserError, match=r"self_attention_cache is a MtpCache.*inner=\(\.\.\., entry"):
        pytree.tree_flatten(cache)
    with registered(replace(ENCODER_DECODER_CACHE, inner=(DYNAMIC_CACHE, entry_of(MtpCache)))):
        leaves, spec = pytree.tree_flatten(cache)
        assert type(pytree.tree_unflatten(leaves, spec).self_attention_cache) is MtpCache


def test_a_class_that_cannot_be_registered_is_refused_with_the_reason() -> None:
    with pytest.raises(UserError, match="DFlashCache has no pytree registration: the number of accepted draft tokens"):
        registered(DFlashCache)


def test_a_layer_that_cannot_be_registered_is_refused_with_the_reason() -> None:
    unlimited = type("DeepseekV4HCACache", (DynamicLayer,), {})
    cache = DynamicCache()
    cache.layers = [unlimited()]
    with registered(), pytest.raises(UserError, match=r"layers\.0 is a DeepseekV4HCACache.*wait for compression"):
        pytree.tree_flatten(cache)


def test_a_hidden_table_of_tensors_is_refused_by_name() -> None:
    cache = DYNAMIC_CACHE.sample()
    cache.layers[0].scores = {"a": [torch.zeros(1)]}
    with registered(), pytest.raises(UserError, match=r"tensor DynamicCache\.layers\.0\.scores"):
        pytree.tree_flatten(cache)


def test_an_empty_cache_of_unknown_shapes_is_refused_with_what_to_do() -> None:
    config = tf.Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"])
    with pytest.raises(UserError, match=r"layers\.0 is a LinearAttentionLayer.*rewind"):
        empty_dynamic_cache(config)


# The proof notices what a row forgets


FORGETFUL = {
    "a window that is not fixed": (
        replace(DYNAMIC_SLIDING_LAYER, static=(), derive=()),
        lambda: DynamicSlidingWindowLayer(sliding_window=2),
        "lost the attributes.*sliding_window",
    ),
    "a count in the context": (
        replace(
            DYNAMIC_SLIDING_LAYER, leaves=("keys", "values"), static=("sliding_window", "cumulative_length"), derive=()
        ),
        lambda: DynamicSlidingWindowLayer(sliding_window=2),
        "lost the attributes \\['_sliding_window_tensor'",
    ),
    "a number that another one follows from": (
        replace(STATIC_CACHE.layers[1], derive=()),
        lambda: StaticSlidingWindowLayer(8, sliding_window=2),
        """has no attribute 'cumulative_length_int'. Add "cumulative_length_int" to the static attributes""",
    ),
    "states beside keys": (
        replace(DYNAMIC_LAYER, cls=LinearAttentionAndFullAttentionLayer),
        LinearAttentionAndFullAttentionLayer,
        "holds the tensor",
    ),
    "flags": (replace(LINEAR_LAYER, derive=()), LinearAttentionLayer, "has no attribute 'has_previous_state'"),
}


@pytest.mark.parametrize(("row", "make", "message"), FORGETFUL.values(), ids=FORGETFUL.keys())
def test_a_row_that_forgets_something_is_refused(row, make, message: str) -> None:
    from pipeline.caches.plain import fill

    def sample() -> DynamicCache:
        cache = DynamicCache()
        cache.layers, cache.layer_class_to_replicate = [make()], None
        fill(cache.layers)
        return cache

    with pytest.raises(UserError, match=message):
        prove_round_trip(CachePytree(DynamicCache, "t.forgets", (row,), sample))
