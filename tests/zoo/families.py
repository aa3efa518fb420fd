"""The families of the zoo that write text: real architectures, two layers or so, random weights. See ``row.py``."""

from __future__ import annotations

import transformers as tf

from pipeline.config import ExportSettings
from tests.zoo.row import Cannot, Family

WINDOW = 8
TOKENS = dict(vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
WIDE = dict(initializer_range=0.3)  # logits that differ clearly, so that greedy choices are no ties
SIZES = dict(
    **TOKENS,
    **WIDE,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=2,
)
HEADS = dict(head_dim=8)
# Of state-space models a program takes one token a call: transformers' own code for more is not one graph.
LOOPS = dict(
    export=ExportSettings(max_prefill_length=1),
    longer=Cannot("export", "specialized it to be a constant", "transformers loops over the tokens in Python."),
)
PADS = dict(
    export=ExportSettings(max_prefill_length=1),
    longer=Cannot(
        "export", "satisfy the generated guard", "transformers pads the tokens to chunks, by as many as are missing."
    ),
)

GROWS = dict(
    export=ExportSettings(max_prefill_length=1),
    longer=Cannot(
        "export", "data-dependent expression", "transformers makes its table of positions longer where it must."
    ),
)


def gemma3() -> tf.PreTrainedConfig:
    kinds = ["sliding_attention", "full_attention"]
    return tf.Gemma3TextConfig(**SIZES, **HEADS, sliding_window=WINDOW, layer_types=kinds)


def gemma3n() -> tf.PreTrainedConfig:
    return tf.Gemma3nTextConfig(
        **{**SIZES, "num_hidden_layers": 4, "intermediate_size": [48] * 4},
        **HEADS,
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=2,
        sliding_window=WINDOW,
        laurel_rank=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4,
    )


def gpt2() -> tf.PreTrainedConfig:
    return tf.GPT2Config(**TOKENS, **WIDE, n_embd=32, n_layer=2, n_head=4, n_positions=64)


def gpt_neox() -> tf.PreTrainedConfig:
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    return tf.GPTNeoXConfig(**TOKENS, **WIDE, **sizes, max_position_embeddings=64)


def opt() -> tf.PreTrainedConfig:
    sizes = dict(hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4)
    return tf.OPTConfig(**TOKENS, **sizes, max_position_embeddings=64, init_std=0.3)


def ctrl() -> tf.PreTrainedConfig:
    return tf.CTRLConfig(**TOKENS, **WIDE, n_embd=32, n_layer=2, n_head=4, dff=48, n_positions=64)


def xglm() -> tf.PreTrainedConfig:
    sizes = dict(d_model=32, ffn_dim=48, num_layers=2, attention_heads=4, max_position_embeddings=64, init_std=0.3)
    return tf.XGLMConfig(**TOKENS, **sizes, decoder_start_token_id=1)


def trocr() -> tf.PreTrainedConfig:
    sizes = dict(d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48, init_std=0.3)
    return tf.TrOCRConfig(**TOKENS, **sizes, decoder_start_token_id=1, max_position_embeddings=64)


def falcon() -> tf.PreTrainedConfig:
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_kv_heads=2)
    return tf.FalconConfig(**TOKENS, **WIDE, **sizes, new_decoder_architecture=True, max_position_embeddings=64)


def cohere2() -> tf.PreTrainedConfig:
    kinds = ["sliding_attention", "full_attention"]
    return tf.Cohere2Config(**SIZES, **HEADS, sliding_window=WINDOW, layer_types=kinds)


def gpt_oss() -> tf.PreTrainedConfig:
    experts = dict(num_local_experts=4, num_experts_per_tok=2)
    return tf.GptOssConfig(**SIZES, **HEADS, **experts, sliding_window=WINDOW)


def mixtral() -> tf.PreTrainedConfig:
    return tf.MixtralConfig(**SIZES, **HEADS, num_local_experts=4, num_experts_per_tok=2)


def qwen3_moe() -> tf.PreTrainedConfig:
    return tf.Qwen3MoeConfig(**SIZES, **HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)


def deepseek_v3() -> tf.PreTrainedConfig:
    """Latent attention: keys are 12 wide, values 8; the second layer has experts."""
    widths = dict(kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8)
    experts = dict(n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=16)
    return tf.DeepseekV3Config(**{**SIZES, "num_key_value_heads": 4}, **widths, **experts, first_k_dense_replace=1)


def llama4() -> tf.PreTrainedConfig:
    kinds = ["chunked_attention", "full_attention"]
    sizes = dict(intermediate_size_mlp=48, num_local_experts=2, attention_chunk_size=WINDOW)
    return tf.Llama4TextConfig(**SIZES, **HEADS, **sizes, layer_types=kinds)


def mamba() -> tf.PreTrainedConfig:
    return tf.MambaConfig(**TOKENS, **WIDE, hidden_size=32, num_hidden_layers=2, state_size=4)


def mamba2() -> tf.PreTrainedConfig:
    heads = dict(num_heads=8, head_dim=8, expand=2, n_groups=1, chunk_size=4)
    return tf.Mamba2Config(**TOKENS, **WIDE, **heads, hidden_size=32, num_hidden_layers=2, state_size=8)


def falcon_h1() -> tf.PreTrainedConfig:
    sizes = dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=4)
    return tf.FalconH1Config(**SIZES, **HEADS, **sizes)


def jamba() -> tf.PreTrainedConfig:
    experts = dict(expert_layer_period=2, expert_layer_offset=1, num_experts=4, num_experts_per_tok=2)
    states = dict(attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False)
    return tf.JambaConfig(**SIZES, **experts, **states)


def lfm2() -> tf.PreTrainedConfig:
    return tf.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"])


def qwen3_next() -> tf.PreTrainedConfig:
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
    linear = dict(linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
    kinds = ["linear_attention", "full_attention"]
    return tf.Qwen3NextConfig(**SIZES, **HEADS, **experts, **linear, layer_types=kinds)


def minimax() -> tf.PreTrainedConfig:
    experts = dict(num_local_experts=4, num_experts_per_tok=2)
    kinds = ["full_attention", "linear_attention"]
    return tf.MiniMaxConfig(**SIZES, **HEADS, **experts, block_size=4, layer_types=kinds)


def recurrent_gemma() -> tf.PreTrainedConfig:
    sizes = {**SIZES, "num_hidden_layers": 3}
    del sizes["initializer_range"]
    return tf.RecurrentGemmaConfig(**sizes, lru_width=32, attention_window_size=WINDOW)


def rwkv() -> tf.PreTrainedConfig:
    sizes = dict(hidden_size=32, attention_hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    return tf.RwkvConfig(**TOKENS, **sizes, context_length=64)


FAMILIES = (
    Family("llama", lambda: tf.LlamaConfig(**SIZES), ci=("buffer", "io")),
    Family("qwen2", lambda: tf.Qwen2Config(**SIZES)),
    Family("qwen3", lambda: tf.Qwen3Config(**SIZES, **HEADS)),
    Family("mistral", lambda: tf.MistralConfig(**SIZES, sliding_window=WINDOW), ci=("buffer",)),
    Family("gemma2", lambda: tf.Gemma2Config(**SIZES, **HEADS, sliding_window=WINDOW)),
    Family("gemma3", gemma3, ci=("io",)),
    Family("gemma3n", gemma3n),
    Family("phi3", lambda: tf.Phi3Config(**SIZES)),
    Family("granite", lambda: tf.GraniteConfig(**SIZES)),
    Family("olmo2", lambda: tf.Olmo2Config(**SIZES)),
    Family("smollm3", lambda: tf.SmolLM3Config(**SIZES, no_rope_layers=[1, 0])),
    Family("gpt2", gpt2),
    Family("gpt_neox", gpt_neox),
    Family("opt", opt),
    Family("ctrl", ctrl),
    Family("xglm", xglm, **GROWS),
    Family("trocr", trocr),
    Family("falcon", falcon),
    Family("starcoder2", lambda: tf.Starcoder2Config(**SIZES)),
    Family("cohere2", cohere2),
    Family("gpt_oss", gpt_oss, ci=("buffer",)),
    Family("mixtral", mixtral, ci=("buffer",)),
    Family("qwen3_moe", qwen3_moe),
    Family("deepseek_v3", deepseek_v3),
    Family("llama4", llama4, ci=("io",)),
    Family("mamba", mamba, **LOOPS, ci=("buffer",)),
    Family("mamba2", mamba2, **PADS),
    Family("falcon_h1", falcon_h1, **PADS, ci=("io",)),
    Family("jamba", jamba, **LOOPS),
    Family("lfm2", lfm2, ci=("buffer",)),
    Family("qwen3_next", qwen3_next, **PADS, ci=("buffer",)),
    Family("minimax", minimax, **LOOPS, ci=("io",)),
    Family("recurrent_gemma", recurrent_gemma, **LOOPS, ci=("buffer",)),
    Family("rwkv", rwkv, **LOOPS, ci=("buffer",)),
)
