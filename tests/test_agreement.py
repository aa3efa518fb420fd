"""Models whose own code would make something else of a device's cache: another attention, or a refusal."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

from pipeline import register as register_module
from pipeline.agreement import tokens_fed
from pipeline.artifacts import Quantized
from pipeline.attention import custom, portable
from pipeline.caches import AttentionShape, LayerShape, device_cache
from pipeline.caches.cross import CrossCache
from pipeline.config import CacheSettings, ExportSettings
from pipeline.register import register
from pipeline.tasks import TASKS
from runners.errors import UserError
from tests.tiny_seq2seq import MODELS

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


@pytest.mark.parametrize("wanted", ["auto", "portable"])
def test_a_window_of_one_token_is_refused_by_its_size(wanted: str) -> None:
    mistral = tf.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=1)
    with pytest.raises(UserError, match=r"a window or chunks of 1 token.* expected 2 or more"):
        attention_of(mistral, wanted)


def layers(*windows: int | None) -> list[LayerShape]:
    return [LayerShape(AttentionShape(2, 8, 8, window)) for window in windows]


@pytest.mark.parametrize(
    ("windows", "length", "tokens"),
    [((None, None), 32, 3), ((None, 8, 16), 32, 10), ((64,), 128, 66), ((65,), 128, 3), ((8,), 9, 9), ((None,), 2, 2)],
)
def test_the_smallest_window_is_crossed_where_it_is_short(
    windows: tuple[int | None, ...], length: int, tokens: int
) -> None:
    assert tokens_fed(device_cache("portable", layers(*windows), length, torch.float32)) == tokens


@pytest.mark.parametrize("wanted", ["auto", "portable"])
@pytest.mark.parametrize("ring", [WINDOW, WINDOW - 2])
def test_a_ring_that_is_shorter_than_the_window_is_noticed(
    ring: int, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the three tokens that each model is fed nothing is forgotten yet."""

    def shortened(*arguments: object) -> object:
        shapes, attention = measured(*arguments)
        assert shapes == layers(WINDOW, WINDOW)
        return layers(ring, ring), attention

    measured = register_module.measured
    monkeypatch.setattr(register_module, "measured", shortened)
    config = tf.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=WINDOW)
    if ring == WINDOW:
        attention_of(config, wanted)
    else:
        with pytest.raises(UserError, match="says something else with a device's cache"):
            attention_of(config, wanted)


def registered_answering(family: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[family]().eval().requires_grad_(False)
    TASKS["text2text"].register(
        Quantized(model, {}), CacheSettings(max_length=32, max_encoder_length=12), ExportSettings()
    )


@pytest.mark.parametrize("family", ["t5", "bart", "marian"])
def test_an_encoder_and_its_decoder_are_compared_too(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registered_answering(family)

    def one_less(self: CrossCache, keys: torch.Tensor, values: torch.Tensor, index: int, **_: object) -> object:
        return update(self, keys[:, :, 1:], values[:, :, 1:], index)

    update = CrossCache.update
    monkeypatch.setattr(CrossCache, "update", one_less)
    with pytest.raises(UserError, match="says something else with a device's cache"):
        registered_answering(family)


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
