"""Models whose own code would make something else of a device's cache: another attention, or a refusal."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

from pipeline.artifacts import Quantized
from pipeline.attention import custom, portable
from pipeline.config import CacheSettings, ExportSettings
from pipeline.register import register
from runners.errors import UserError

SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=64,
    pad_token_id=0,
    initializer_range=0.3,
)
WINDOW = 4


def diffllama() -> tf.PreTrainedConfig:
    """Halves the values' heads on their way to the attention."""
    return tf.DiffLlamaConfig(**SIZES, num_key_value_heads=2)


def modernbert() -> tf.PreTrainedConfig:
    """Makes a mask with a window also where its cache keeps all tokens."""
    return tf.ModernBertDecoderConfig(
        **SIZES,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
        local_attention=WINDOW,
        layer_types=["full_attention"] * 2,
    )


def gpt_neo() -> tf.PreTrainedConfig:
    """Takes the number of keys that it sees for the number of tokens."""
    return tf.GPTNeoConfig(
        vocab_size=64,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        window_size=WINDOW,
        attention_types=[[["global", "local"], 1]],
        initializer_range=0.3,
    )


def bert(*, is_decoder: bool) -> tf.PreTrainedConfig:
    return tf.BertConfig(**SIZES, is_decoder=is_decoder)


def attention_of(config: tf.PreTrainedConfig, wanted: str = "auto") -> str:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = tf.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    return register(Quantized(model, {}), CacheSettings(max_length=32), ExportSettings(attention=wanted)).attention


@pytest.mark.parametrize(
    ("config", "why"),
    [(diffllama, "changes keys or values on their way"), (modernbert, "masks windows or chunks over a cache")],
)
def test_attention_that_would_not_fit_is_not_chosen(config: type[tf.PreTrainedConfig], why: str) -> None:
    assert attention_of(config()) == "portable"
    with pytest.raises(UserError, match=f"custom does not fit this model: .*{why}"):
        attention_of(config(), "custom")


def test_a_window_that_only_the_cache_has_is_refused() -> None:
    sizes = {name: SIZES[name] for name in SIZES if name not in ("intermediate_size", "pad_token_id")}
    moshi = tf.MoshiConfig(**sizes, num_key_value_heads=2, ffn_dim=48, sliding_window=WINDOW, head_dim=8)
    with pytest.raises(UserError, match="keeps the last 4 tokens in its cache, but its mask has no window"):
        attention_of(moshi)


@pytest.mark.parametrize("config", [gpt_neo(), bert(is_decoder=False)], ids=["gpt_neo", "bert"])
def test_a_model_that_would_say_something_else_is_refused(config: tf.PreTrainedConfig) -> None:
    with pytest.raises(UserError, match="says something else with a device's cache than with transformers' own"):
        attention_of(config)


def test_the_kernels_that_run_in_the_build_are_not_heard(capfd: pytest.CaptureFixture[str]) -> None:
    config = tf.LlamaConfig(**SIZES, num_key_value_heads=2, bos_token_id=1, eos_token_id=2)
    assert attention_of(config) == "custom"
    assert capfd.readouterr().err == ""


def test_a_decoder_of_the_same_class_is_taken() -> None:
    assert attention_of(bert(is_decoder=True)) in ("custom", "portable")


@pytest.mark.parametrize("attend", [custom, portable])
@pytest.mark.parametrize("keyword", ["sinks", "block_indices"])
def test_mechanisms_that_are_not_written_are_refused(attend: object, keyword: str) -> None:
    x = torch.zeros(1, 1, 1, 8)
    with pytest.raises(UserError, match=rf"\({keyword}\), which {attend.__name__} lacks"):
        attend(torch.nn.Identity(), x, x, x, None, **{keyword: x})
