"""Every kind of cache through plain ``torch.export``: the program decodes as eager does, and all steps have one spec.

Prompts of one program differ in length from the example that it was traced with, and windows of 8 are crossed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
import transformers as tf
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache, DynamicCache, QuantizedCache, StaticCache
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

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


MOE = dict(num_experts_per_tok=1, moe_intermediate_size=16)
PLAIN, FLOW = "StaticLayer", "DynamicLayer"
WINDOWED, FLOWING_WINDOW = "StaticSlidingWindowLayer", "DynamicSlidingWindowLayer"
LINEAR, DUMMY = "LinearAttentionLayer", "DummyLayer"


def minimax_m3() -> tf.PreTrainedConfig:
    return tf.MiniMaxM3VLTextConfig(
        **SIZES,
        dense_intermediate_size=48,
        shared_intermediate_size=48,
        rotary_dim=4,
        mlp_layer_types=["dense", "dense"],
        num_local_experts=2,
        num_experts_per_tok=1,
        index_n_heads=2,
        index_head_dim=8,
        index_block_size=4,
        index_topk_blocks=2,
        layer_types=["minimax_m3_sparse", "full_attention"],
    )


def inkling(local: list[int]) -> tf.PreTrainedConfig:
    return tf.InklingTextConfig(
        **SIZES,
        **MOE,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=8,
        sliding_window_size=WINDOW,
        d_rel=4,
        rel_extent=16,
        mlp_layer_types=["dense", "dense"],
        n_routed_experts=2,
        local_layer_ids=local,
    )


def deepseek_v32() -> tf.PreTrainedConfig:
    return tf.DeepseekV32Config(
        **{**SIZES, **MOE, "num_key_value_heads": 4},
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        n_routed_experts=2,
        n_group=1,
        topk_group=1,
        index_topk=4,
        index_head_dim=8,
        index_n_heads=2,
        mlp_layer_types=["dense", "dense"],
    )


def gemma3n() -> tf.PreTrainedConfig:
    return tf.Gemma3nTextConfig(
        **{**SIZES, "num_hidden_layers": 4, "intermediate_size": [48] * 4},
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=2,
        sliding_window=WINDOW,
        laurel_rank=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4,
    )


def falcon_h1() -> tf.PreTrainedConfig:
    sizes = dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=4)
    return tf.FalconH1Config(**SIZES, **sizes)


def llama4() -> tf.PreTrainedConfig:
    kinds = ["chunked_attention", "full_attention"]
    sizes = dict(intermediate_size_mlp=48, num_local_experts=2, attention_chunk_size=WINDOW)
    return tf.Llama4TextConfig(**SIZES, **sizes, layer_types=kinds)


def gemma3() -> tf.PreTrainedConfig:
    kinds = ["sliding_attention", "full_attention"]
    return tf.Gemma3TextConfig(**SIZES, sliding_window=WINDOW, layer_types=kinds)


def mamba() -> tf.PreTrainedConfig:
    return tf.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4, initializer_range=0.3)


@dataclass(frozen=True)
class Case:
    """A tiny random architecture with one kind of cache, and the classes of that cache's layers."""

    config: Callable[[], tf.PreTrainedConfig]
    layers: tuple[str, ...]

    @property
    def kind(self) -> str:
        return "dynamic" if any("Dynamic" in name or name == LINEAR_FLOW for name in self.layers) else "static"


LINEAR_FLOW = "LinearAttentionAndFullAttentionLayer"
CASES = {
    "mistral-static": Case(lambda: tf.MistralConfig(**SIZES, sliding_window=WINDOW), (WINDOWED,) * 2),
    "mistral-dynamic": Case(lambda: tf.MistralConfig(**SIZES, sliding_window=WINDOW), (FLOWING_WINDOW,) * 2),
    "gemma2-static": Case(lambda: tf.Gemma2Config(**SIZES, sliding_window=WINDOW), (WINDOWED, PLAIN)),
    "gemma3-static": Case(gemma3, (WINDOWED, PLAIN)),
    "gemma3-dynamic": Case(gemma3, (FLOWING_WINDOW, FLOW)),
    "llama4-static": Case(llama4, (WINDOWED, PLAIN)),
    "llama4-dynamic": Case(llama4, (FLOWING_WINDOW, FLOW)),
    "gemma3n-static": Case(gemma3n, (WINDOWED, PLAIN, DUMMY, DUMMY)),
    "gemma3n-dynamic": Case(gemma3n, (FLOWING_WINDOW, FLOW, DUMMY, DUMMY)),
    "lfm2-static": Case(lambda: tf.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]), (LINEAR, PLAIN)),
    "lfm2-dynamic": Case(lambda: tf.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]), (LINEAR, FLOW)),
    "deepseek_v32-static": Case(deepseek_v32, ("StaticIndexedLayer",) * 2),
    "deepseek_v32-dynamic": Case(deepseek_v32, ("DynamicIndexedLayer",) * 2),
    "minimax_m3-static": Case(minimax_m3, ("MiniMaxM3VLSparseStaticCacheLayer", PLAIN)),
    "inkling-static": Case(lambda: inkling([0, 1]), ("LinearAttentionAndStaticSlidingWindowAttentionLayer",) * 2),
    "inkling-dynamic": Case(lambda: inkling([0]), ("LinearAttentionAndSlidingWindowAttentionLayer", LINEAR_FLOW)),
}
ONE_TOKEN = {
    "mamba": Case(mamba, (LINEAR,) * 2),
    "falcon_h1-static": Case(falcon_h1, ("LinearAttentionAndStaticFullAttentionLayer",) * 2),
    "falcon_h1-dynamic": Case(falcon_h1, (LINEAR_FLOW,) * 2),
}
TRANSFORMERS_CANNOT = {
    "mamba": (ONE_TOKEN["mamba"], "Guard failed: input_ids.size()[1] == 3: the scan is a Python loop over the tokens"),
    "falcon_h1": (
        ONE_TOKEN["falcon_h1-static"],
        "Guard failed: 4 >= input_ids.size()[1] + ...: the scan is a Python loop over chunks of four tokens",
    ),
    "minimax_m3": (
        Case(minimax_m3, ("MiniMaxM3VLSparseCacheLayer", FLOW)),
        "Guard failed: ... idx_keys.size()[2] ... // 4 != 0: whether index keys are padded to blocks is a branch",
    ),
    "inkling": (
        Case(
            lambda: inkling([0]),
            ("LinearAttentionAndStaticSlidingWindowAttentionLayer", "LinearAttentionAndStaticFullAttentionLayer"),
        ),
        "Tensor-likes are not close: the model reads a StaticLayer's count after update() added to it in place",
    ),
}


def model_of(config: tf.PreTrainedConfig) -> tf.PreTrainedModel:
    torch.manual_seed(0)
    if config.model_type == "minimax_m3_vl_text":  # the automatic classes know only its vision-language model
        return MiniMaxM3VLForCausalLM(config).eval().requires_grad_(False)
    return tf.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def new(kind: str, config: tf.PreTrainedConfig) -> Cache:
    return DynamicCache(config=config) if kind == "dynamic" else StaticCache(config, max_cache_len=LENGTH)


def started(kind: str, model: tf.PreTrainedModel, tokens: int) -> Cache:
    """A cache after so many tokens in eager mode; after none, rewound."""
    cache = new(kind, model.config)
    model(input_ids=IDS[:, : max(tokens, 1)], cache=cache)
    return cache if tokens else rewind(cache)


GROWING = {"keys": 2, "values": 2, "indexer_keys": 1, "idx_keys": 2}  # the axis of the tokens


def cache_shapes(cache: Cache) -> list[dict[int, object] | None]:
    """For ``dynamic_shapes``: which axis of each leaf grows."""
    names = [path[-1].key.rsplit(".", 1)[-1] for path, _ in pytree.tree_flatten_with_path(cache)[0]]
    grows = isinstance(cache, DynamicCache)
    return [{GROWING[name]: Dim.AUTO} if grows and name in GROWING else None for name in names]


def export(model: tf.PreTrainedModel, cache: Cache, tokens: int | None = None, strict: bool = False) -> ExportedProgram:
    """A program of calls of any number of tokens, or of exactly so many."""
    shapes = {"input_ids": {1: Dim.AUTO} if tokens is None else None, "cache": cache_shapes(cache)}
    arguments = {"input_ids": IDS[:, : tokens or 3], "cache": cache}
    return torch.export.export(model, (), arguments, dynamic_shapes=shapes, strict=strict)


def assert_decodes(program: ExportedProgram, model: tf.PreTrainedModel, cache: Cache, calls: Sequence[int]) -> Cache:
    """Each call's logits equal those of eager with transformers' own cache, and every returned cache has one spec."""
    module, spec, at = program.module(), pytree.tree_structure(cache), 0
    eager = new("dynamic" if isinstance(cache, DynamicCache) else "static", model.config)
    for tokens in calls:
        ids, at = IDS[:, at : at + tokens], at + tokens
        expected = model(input_ids=ids, cache=eager).logits
        output = module(input_ids=ids, cache=cache)
        cache = output.cache
        torch.testing.assert_close(output.logits, expected, atol=1e-4, rtol=1e-4)
        assert pytree.tree_structure(cache) == spec
        assert [type(layer) for layer in cache.layers] == [type(layer) for layer in eager.layers]
    return cache


ANY_LENGTH = (5, 2, 3, 1, 1, 1, 1, 7)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_one_program_takes_prompts_of_any_length_and_decodes_across_the_window(case: Case) -> None:
    model = model_of(case.config())
    with registered():
        cache = started(case.kind, model, 0)
        assert tuple(type(layer).__name__ for layer in cache.layers) == case.layers
        assert_decodes(export(model, started(case.kind, model, 3)), model, cache, ANY_LENGTH)


@pytest.mark.parametrize("case", ONE_TOKEN.values(), ids=ONE_TOKEN.keys())
def test_a_program_of_one_token_decodes_where_the_model_loops_over_tokens(case: Case) -> None:
    model = model_of(case.config())
    with registered():
        cache = started(case.kind, model, 0)
        assert tuple(type(layer).__name__ for layer in cache.layers) == case.layers
        assert_decodes(export(model, started(case.kind, model, 3), 1), model, cache, [1] * 12)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=pytest.mark.xfail(strict=True, raises=AssertionError, reason=reason))
        for name, (case, reason) in TRANSFORMERS_CANNOT.items()
    ],
)
def test_where_transformers_itself_cannot(case: Case) -> None:
    model = model_of(case.config())
    with registered():
        cache = started(case.kind, model, 0)
        if tuple(type(layer).__name__ for layer in cache.layers) != case.layers:
            pytest.fail("another cache than the one that is meant", pytrace=False)
        assert_decodes(export(model, started(case.kind, model, 3)), model, cache, ANY_LENGTH)


@pytest.mark.parametrize("name", ["gemma3-static", "gemma3-dynamic", "lfm2-static"])
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
def test_strict_export_traces_the_same(name: str) -> None:
    model = model_of(CASES[name].config())
    with registered():
        cache = started(CASES[name].kind, model, 0)
        program = export(model, started(CASES[name].kind, model, 3), strict=True)
        assert_decodes(program, model, cache, ANY_LENGTH)


def test_a_program_is_traced_past_the_window_or_before_it_alike() -> None:
    """An example on either side of the window serves for both."""
    model = model_of(gemma3())
    with registered():
        for kind in ("static", "dynamic"):
            program = export(model, started(kind, model, WINDOW + 3))
            assert_decodes(program, model, started(kind, model, 0), ANY_LENGTH)


def test_a_static_cache_given_again_goes_on_where_the_program_left_it() -> None:
    """Its tensors are written in place, the counts too: a loop that ignores the returned cache decodes as well."""
    model = model_of(gemma3())
    cache, eager = started("static", model, 0), new("static", model.config)
    with registered():
        module = export(model, started("static", model, 3)).module()
        for at in range(0, 20, 2):
            ids = IDS[:, at : at + 2]
            expected = model(input_ids=ids, cache=eager).logits
            torch.testing.assert_close(module(input_ids=ids, cache=cache).logits, expected, atol=1e-4, rtol=1e-4)


def test_eager_goes_on_with_a_cache_that_a_program_returned() -> None:
    model = model_of(gemma3())
    with registered():
        for kind in ("static", "dynamic"):
            program = export(model, started(kind, model, 3))
            cache = assert_decodes(program, model, started(kind, model, 0), (5, 6))
            whole = model(input_ids=IDS).logits
            for at in range(11, 20):
                logits = model(input_ids=IDS[:, at : at + 1], cache=cache).logits
                torch.testing.assert_close(logits[:, 0], whole[:, at], atol=1e-4, rtol=1e-4)


def test_an_eight_bit_float_cache_decodes_after_its_prompt() -> None:
    """The prompt chooses the scales, so the program begins behind it."""
    model = model_of(tf.LlamaConfig(**SIZES))
    caches = [QuantizedCache("fp8", model.config) for _ in range(3)]
    for cache in caches:
        model(input_ids=IDS[:, :5], cache=cache)
    eager, cache, example = caches
    with registered():
        spec, paths = pytree.tree_structure(cache), [path for path, _ in pytree.tree_flatten_with_path(example)[0]]
        growing = [
            {2: Dim.AUTO}
            if path[-1].key.endswith("_quantized_keys.0") or path[-1].key.endswith("_quantized_values.0")
            else None
            for path in paths
        ]
        shapes = {"input_ids": {1: Dim.AUTO}, "cache": growing}
        arguments = {"input_ids": IDS[:, 5:8], "cache": example}
        module = torch.export.export(model, (), arguments, dynamic_shapes=shapes, strict=False).module()
        for at in range(5, 12):
            ids = IDS[:, at : at + 1]
            output = module(input_ids=ids, cache=cache)
            cache = output.cache
            expected = model(input_ids=ids, cache=eager).logits
            torch.testing.assert_close(output.logits, expected, atol=1e-4, rtol=1e-4)
            assert pytree.tree_structure(cache) == spec
