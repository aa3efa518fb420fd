"""MiniMax's own cache through plain ``torch.export``: states in a list beside the layers of attention."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import transformers as tf
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from pipeline.caches import registered, rewind
from pipeline.caches.minimax import MINIMAX_CACHE
from runners.errors import UserError

PREFILL, STEPS = 5, 24
IDS = torch.randint(3, 64, (1, PREFILL + STEPS), generator=torch.Generator().manual_seed(0))
ALTERNATING = ["full_attention", "linear_attention"] * 2


def model_of(kinds: list[str]) -> tf.MiniMaxForCausalLM:
    """A tiny random model; a prompt of five tokens takes two blocks of linear attention."""
    config = tf.MiniMaxConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_hidden_layers=len(kinds),
        layer_types=kinds,
        block_size=4,
        num_local_experts=2,
        num_experts_per_tok=1,
        initializer_range=0.3,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return tf.MiniMaxForCausalLM(config).eval().requires_grad_(False)


def started(model: tf.MiniMaxForCausalLM, tokens: int) -> MiniMaxCache:
    """A cache after so many tokens in eager mode; after none, rewound."""
    cache = MiniMaxCache()
    model(input_ids=IDS[:, : max(tokens, 1)], cache=cache)
    return cache if tokens else rewind(cache)


def names(cache: MiniMaxCache) -> list[str]:
    return [path[-1].key for path, _ in pytree.tree_flatten_with_path(cache)[0]]


def growing(cache: MiniMaxCache) -> list[dict[int, object] | None]:
    """For ``dynamic_shapes``: keys and values grow, states do not."""
    return [{2: Dim.AUTO} if "layers" in name else None for name in names(cache)]


def export(model: tf.MiniMaxForCausalLM, tokens: int, *, strict: bool = False, free: bool = False) -> ExportedProgram:
    """A program of calls of exactly so many tokens, or of any number, on a cache of any length."""
    cache = started(model, 3)
    shapes = {"input_ids": {1: Dim.AUTO} if free else None, "cache": growing(cache)}
    arguments = {"input_ids": IDS[:, :tokens], "cache": cache}
    return torch.export.export(model, (), arguments, dynamic_shapes=shapes, strict=strict)


def assert_decodes(model: tf.MiniMaxForCausalLM, programs: Sequence[tuple[ExportedProgram, int]]) -> None:
    """Each call's logits equal those of eager with transformers' own cache, and every returned cache has one spec."""
    cache, eager, at = started(model, 0), MiniMaxCache(), 0
    spec = pytree.tree_structure(cache)
    for program, tokens in programs:
        ids, at = IDS[:, at : at + tokens], at + tokens
        expected = model(input_ids=ids, cache=eager).logits
        output = program.module()(input_ids=ids, cache=cache)
        cache = output.cache
        torch.testing.assert_close(output.logits, expected, atol=1e-4, rtol=1e-4)
        assert pytree.tree_structure(cache) == spec
        assert [layer.is_initialized for layer in cache.layers] == [layer.is_initialized for layer in eager.layers]
        assert cache.get_seq_length() == at


@pytest.mark.export
@pytest.mark.parametrize("kinds", [ALTERNATING, ["full_attention", *["linear_attention"] * 2, "full_attention"]])
def test_a_prompt_and_its_continuation_equal_eager(kinds: list[str]) -> None:
    model = model_of(kinds)
    with registered(MiniMaxCache):
        prefill, step = export(model, PREFILL), export(model, 1)
        assert_decodes(model, [(prefill, PREFILL), *[(step, 1)] * STEPS])


@pytest.mark.export
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
def test_strict_export_traces_the_same() -> None:
    model = model_of(ALTERNATING)
    with registered(MiniMaxCache):
        assert_decodes(model, [(export(model, 1, strict=True), 1)] * 6)


@pytest.mark.export
@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="Guard failed: input_ids.size()[1] == 3: with a state, lightning attention is a Python loop over the tokens",
)
def test_one_program_of_any_length() -> None:
    model = model_of(ALTERNATING)
    with registered(MiniMaxCache):
        assert_decodes(model, [(export(model, 3, free=True), tokens) for tokens in (PREFILL, 1)])


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="transformers counts tokens at place 0, where a model that begins with linear attention has none",
)
def test_transformers_counts_where_the_first_layer_is_linear() -> None:
    cache = started(model_of(["linear_attention", "full_attention"]), 3)
    assert cache.get_seq_length() == 3


@pytest.mark.export
def test_with_given_positions_a_model_that_begins_with_linear_attention_decodes() -> None:
    model = model_of(["linear_attention", "full_attention"] * 2)
    whole = model(input_ids=IDS).logits
    with registered(MiniMaxCache):
        example, cache = started(model, 3), started(model, 0)
        shapes = {"input_ids": None, "position_ids": None, "cache": growing(example)}
        arguments = {"input_ids": IDS[:, :1], "position_ids": torch.tensor([[3]]), "cache": example}
        module = torch.export.export(model, (), arguments, dynamic_shapes=shapes, strict=False).module()
        for at in range(IDS.shape[1]):
            position = torch.tensor([[at]])
            output = module(input_ids=IDS[:, at : at + 1], position_ids=position, cache=cache)
            cache = output.cache
            torch.testing.assert_close(output.logits[:, 0], whole[:, at], atol=1e-4, rtol=1e-4)


def test_leaves_are_named_by_place() -> None:
    with registered(MiniMaxCache):
        assert names(MINIMAX_CACHE.sample()) == [
            "layers.0.keys",
            "layers.0.values",
            "linear_cache.1",
            "linear_cache.2",
            "layers.3.keys",
            "layers.3.values",
        ]


def test_rewound_it_decodes_as_a_new_one() -> None:
    model = model_of(ALTERNATING)
    cache = rewind(started(model, 4))
    assert cache.get_seq_length() == 0
    expected = model(input_ids=IDS[:, :7]).logits
    torch.testing.assert_close(model(input_ids=IDS[:, :7], cache=cache).logits, expected, atol=1e-4, rtol=1e-4)


def test_a_cache_that_holds_nothing_is_refused() -> None:
    with registered(MiniMaxCache), pytest.raises(UserError, match=r"MiniMaxCache holds nothing yet.*rewind"):
        pytree.tree_flatten(MiniMaxCache())


def test_a_place_of_attention_without_tokens_is_refused() -> None:
    cache = MINIMAX_CACHE.sample()
    cache.linear_cache[1] = []
    with registered(MiniMaxCache), pytest.raises(UserError, match=r"MiniMaxCache\.layers\.1 .* has no tensors yet"):
        pytree.tree_flatten(cache)


def test_a_tensor_of_its_own_is_not_lost() -> None:
    cache = MINIMAX_CACHE.sample()
    cache.scores = torch.zeros(1)
    with registered(MiniMaxCache), pytest.raises(UserError, match="holds the tensor scores"):
        pytree.tree_flatten(cache)
