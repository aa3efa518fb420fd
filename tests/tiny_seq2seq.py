"""Tiny random encoder-decoder models, saved as transformers saves any, and recordings for those that hear."""

from __future__ import annotations

import json
import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MoonshineConfig,
    MoonshineForConditionalGeneration,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from tests import tiny

VOCABULARY = 300
RATE = 16_000
LENGTH = 48  # positions of each decoder that has a number of them
SIZES = dict(
    vocab_size=VOCABULARY,
    d_model=32,
    encoder_layers=1,
    decoder_layers=2,
    encoder_attention_heads=2,
    decoder_attention_heads=4,
    encoder_ffn_dim=64,
    decoder_ffn_dim=96,
    init_std=0.5,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
)


def _whisper() -> PreTrainedModel:
    """A second of sound: 100 frames, 50 positions."""
    sizes = dict(num_mel_bins=8, max_source_positions=50, max_target_positions=LENGTH)
    model = WhisperForConditionalGeneration(WhisperConfig(**SIZES, **sizes))
    model.generation_config.suppress_tokens = [5, 6]
    model.generation_config.begin_suppress_tokens = [7, 2]
    return model


def _moonshine() -> PreTrainedModel:
    sizes = dict(encoder_num_hidden_layers=1, decoder_num_hidden_layers=2, max_position_embeddings=LENGTH)
    heads = dict(encoder_num_attention_heads=2, decoder_num_attention_heads=4)
    ids = dict(bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
    config = MoonshineConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, initializer_range=0.5, **sizes, **heads, **ids
    )
    return MoonshineForConditionalGeneration(config)


def _t5() -> PreTrainedModel:
    sizes = dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, initializer_factor=2.0)
    ids = dict(pad_token_id=0, eos_token_id=2, decoder_start_token_id=0)
    # 4 buckets of 8: positions far apart share one
    config = T5Config(
        vocab_size=VOCABULARY, relative_attention_num_buckets=8, relative_attention_max_distance=12, **sizes, **ids
    )
    return T5ForConditionalGeneration(config)


def _bart() -> PreTrainedModel:
    model = BartForConditionalGeneration(BartConfig(**SIZES, max_position_embeddings=LENGTH))
    model.generation_config.forced_bos_token_id = 3
    return model


def _marian() -> PreTrainedModel:
    model = MarianMTModel(MarianConfig(**SIZES, max_position_embeddings=LENGTH))
    model.generation_config.bad_words_ids = [[0], [8, 9]]
    return model


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "whisper": _whisper,
    "moonshine": _moonshine,
    "t5": _t5,
    "bart": _bart,
    "marian": _marian,
}
HEARING = ("whisper", "moonshine")
_PREPROCESSORS = {
    "whisper": {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 8,
        "sampling_rate": RATE,
        "hop_length": 160,
        "chunk_length": 1,
        "n_fft": 400,
        "padding_value": 0.0,
    },
    "moonshine": {
        "feature_extractor_type": "Wav2Vec2FeatureExtractor",
        "feature_size": 1,
        "sampling_rate": RATE,
        "do_normalize": False,
        "padding_value": 0.0,
    },
}


def save(family: str, folder: Path) -> Path:
    """Write a model of ``family`` with its tokenizer, and give the folder back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[family]().eval()
    model.save_pretrained(folder)
    tokenizer = tiny.tokenizer(VOCABULARY)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    if family in _PREPROCESSORS:
        (folder / "preprocessor_config.json").write_text(json.dumps(_PREPROCESSORS[family]))
    return folder


def tone(seconds: float, seed: int = 0) -> np.ndarray:
    """A gliding tone with some noise, float32 ``[samples]``."""
    time = np.arange(int(seconds * RATE)) / RATE
    noise = np.random.default_rng(seed).normal(size=len(time))
    return (0.4 * np.sin(2 * np.pi * (200 + 100 * seed + 300 * time) * time) + 0.05 * noise).astype(np.float32)


def write_wav(path: Path, samples: np.ndarray) -> Path:
    """Write one channel of 16 bits."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return path
