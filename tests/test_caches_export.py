"""Every kind of cache through plain ``torch.export``: the program decodes as eager does, and all steps have one spec.

Prompts of one program differ in length from the example that it was traced with, and windows of 8 are crossed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import transformers as tf
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache, DynamicCache, StaticCache

from pipeline.caches import registered, rewind

pytestmark = pytest.mark.export

WINDOW, LENGTH = 8, 32
SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_hidden_layers=2,
    initializer_range=0.3,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
IDS = torch.randint(3, 64, (1, 24), generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Family:
    """A tiny random architecture: its config, and the kind of every layer of its caches."""

    config: Callable[[], tf.PreTrainedConfig]
    static: tuple[str, ...] = ()
    dynamic: tuple[str, ...] = ()


FAMILIES = {
    "mistral": Family(
        lambda: tf.MistralConfig(**SIZES, sliding_window=WINDOW),
        ("StaticSlidingWindowLayer",) * 2,
        ("DynamicSlidingWindowLayer",) * 2,
    ),
    "gemma2": Family(
        lambda: tf.Gemma2Config(**SIZES, sliding_window=WINDOW),
        ("StaticSlidingWindowLayer", "StaticLayer"),
        ("DynamicSlidingWindowLayer", "DynamicLayer"),
    ),
    "gemma3": Family(
        lambda: tf.Gemma3TextConfig(
            **SIZES, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
        ),
        ("StaticSlidingWindowLayer", "StaticLayer"),
        ("DynamicSlidingWindowLayer", "DynamicLayer"),
    ),
    "llama4": Family(
        lambda: tf.Llama4TextConfig(
            **SIZES,
            intermediate_size_mlp=48,
            num_local_experts=2,
            attention_chunk_size=WINDOW,
            layer_types=["chunked_attention", "full_attention"],
        ),
        ("StaticSlidingWindowLayer", "StaticLayer"),
        ("DynamicSlidingWindowLayer", "DynamicLayer"),
    ),
    "lfm2": Family(
        lambda: tf.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]),
        ("LinearAttentionLayer", "StaticLayer"),
        ("LinearAttentionLayer", "DynamicLayer"),
    ),
    "mamba": Family(
        lambda: tf.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4, initializer_range=0.3),
        (),
        ("LinearAttentionLayer",) * 2,
    ),
}
CASES = [
    pytest.param(family, kind, id=f"{family}-{kind}")
    for family, row in FAMILIES.items()
    for kind in ("static", "dynamic")
    if getattr(row, kind)
]


def model_of(config: tf.PreTrainedConfig) -> tf.PreTrainedModel:
    torch.manual_seed(0)
    return tf.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def new(kind: str, config: tf.PreTrainedConfig) -> Cache:
    return DynamicCache(config=config) if kind == "dynamic" else StaticCache(config, max_cache_len=LENGTH)


def started(kind: str, model: tf.PreTrainedModel, tokens: int) -> Cache:
    """A cache after so many tokens in eager mode; after none, rewound."""
    cache = new(kind, model.config)
    model(input_ids=IDS[:, : max(tokens, 1)], cache=cache)
    return cache if tokens else rewind(cache)


def export(model: tf.PreTrainedModel, cache: Cache, tokens: int | None) -> ExportedProgram:
    """A program of calls of any number of tokens, or of exactly so many."""
    ids = IDS[:, : tokens or 3]
    growing = [
        {2: Dim.AUTO} if leaf.ndim == 4 and isinstance(cache, DynamicCache) else None
        for leaf in pytree.tree_leaves(cache)
    ]
    shapes = {"input_ids": {1: Dim.AUTO} if tokens is None else None, "cache": growing}
    return torch.export.export(model, (), {"input_ids": ids, "cache": cache}, dynamic_shapes=shapes, strict=False)


def assert_decodes(program: ExportedProgram, model: tf.PreTrainedModel, cache: Cache, kind: str, *calls: int) -> None:
    """Each call's logits equal those of eager with transformers' own cache, and every returned cache has one spec."""
    module, eager, spec, at = program.module(), new(kind, model.config), pytree.tree_structure(cache), 0
    for tokens in calls:
        ids, at = IDS[:, at : at + tokens], at + tokens
        expected = model(input_ids=ids, cache=eager).logits
        output = module(input_ids=ids, cache=cache)
        cache = output.cache
        torch.testing.assert_close(output.logits, expected, atol=1e-4, rtol=1e-4)
        assert pytree.tree_structure(cache) == spec
        assert [type(layer) for layer in cache.layers] == [type(layer) for layer in eager.layers]


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_a_program_of_one_prompt_length_decodes_across_the_window(family: str, kind: str) -> None:
    row = FAMILIES[family]
    model = model_of(row.config())
    with registered():
        cache = started(kind, model, 0)
        assert tuple(type(layer).__name__ for layer in cache.layers) == getattr(row, kind)
        program = export(model, started(kind, model, 3), None)
        assert_decodes(program, model, cache, kind, 5, 2, 3, 1, 1, 1, 1, 7)
