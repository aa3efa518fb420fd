"""A folder with a CTranslate2 Whisper model becomes, once, a folder as transformers saves one; it lies in the cache."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from pydantic import JsonValue
from safetensors.numpy import save_file

from pipeline.sources import ctranslate2, ctranslate2_whisper
from pipeline.sources.cached import cache_directory, kept_folder
from pipeline.sources.ctranslate2_whisper import Sizes
from pipeline.sources.fetched import folder_digest
from pipeline.sources.folder import CONFIG, TOKENIZER_CONFIG, matching, read_json
from runners.errors import UserError

# Part of the cache's path: raise it whenever the same model would be converted into other files.
CONVERSION = 1
TOKENIZER, GENERATION, PREPROCESSOR = "tokenizer.json", "generation_config.json", "preprocessor_config.json"
CARD = "README.md"
SAMPLING_RATE, HOP, FFT = 16_000, 160, 400  # of the audio every Whisper model was trained on: Hz, samples, samples
START, END, NO_TIMES, PREVIOUS = "<|startoftranscript|>", "<|endoftext|>", "<|notimestamps|>", "<|startofprev|>"
TASKS = ("transcribe", "translate")
# Whisper's own rule: a vocabulary of 51,865 tokens and more has all languages, one of 51,864 only English
MULTILINGUAL = 51_865


def is_ctranslate2(folder: Path) -> bool:
    """Whether the folder's weights are a ``model.bin`` of CTranslate2, and there are none that transformers reads."""
    return ctranslate2.is_model(folder / ctranslate2.MODEL) and not matching(folder, ("*.safetensors",))


def source_digest(folder: Path) -> str:
    """The folder digest of the files that are read."""
    names = (ctranslate2.MODEL, CONFIG, TOKENIZER, PREPROCESSOR, CARD)
    return folder_digest((folder / name for name in names if (folder / name).is_file()), folder)


def converted(folder: Path) -> Path:
    """The folder that transformers loads, converted now or earlier.

    Raises:
        UserError: the model is damaged or is no float Whisper model, or the folder lacks its tokenizer.
    """
    place = cache_directory() / "ctranslate2" / f"{source_digest(folder)}-{CONVERSION}" / folder.resolve().name
    return kept_folder(place, lambda target: _convert(folder, target))


def _convert(folder: Path, target: Path) -> None:
    if not (folder / TOKENIZER).is_file():
        raise UserError(
            f"{folder} has no {TOKENIZER}; expected one beside {ctranslate2.MODEL}: take it from the original"
        )
    model = ctranslate2.read(folder / ctranslate2.MODEL)
    found = ctranslate2_whisper.sizes(model)
    tokens = _special_tokens(folder / TOKENIZER, found.vocabulary)
    weights = ctranslate2_whisper.state_dict(model, found)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    dtype = str(weights["model.decoder.embed_tokens.weight"].dtype)
    hints = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    _write(target / CONFIG, _config(found, tokens, dtype))
    _write(target / GENERATION, _generation(found, tokens, hints))
    _write(target / TOKENIZER_CONFIG, _tokenizer_config(found))
    _write(target / PREPROCESSOR, _preprocessor(found))
    for name in (TOKENIZER, PREPROCESSOR, CARD):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)


def _config(found: Sizes, tokens: dict[str, int], dtype: str) -> dict[str, JsonValue]:
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "dtype": dtype,
        "d_model": found.width,
        "vocab_size": found.vocabulary,
        "num_mel_bins": found.mel_bins,
        "max_source_positions": found.audio_positions,
        "max_target_positions": found.text_positions,
        "encoder_layers": found.encoder_layers,
        "decoder_layers": found.decoder_layers,
        "encoder_attention_heads": found.encoder_heads,
        "decoder_attention_heads": found.decoder_heads,
        "encoder_ffn_dim": found.encoder_feed_forward,
        "decoder_ffn_dim": found.decoder_feed_forward,
        "activation_function": "gelu",
        "scale_embedding": False,
        "tie_word_embeddings": True,
        "is_encoder_decoder": True,
        "decoder_start_token_id": tokens[START],
        "bos_token_id": tokens[END],
        "eos_token_id": tokens[END],
        "pad_token_id": tokens[END],
    }


def _generation(found: Sizes, tokens: dict[str, int], hints: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """What ``generate`` needs; the tokens that are never written come from CTranslate2's own config.json."""
    multilingual = found.vocabulary >= MULTILINGUAL
    settings: dict[str, JsonValue] = {
        "bos_token_id": tokens[END],
        "eos_token_id": tokens[END],
        "pad_token_id": tokens[END],
        "decoder_start_token_id": tokens[START],
        "no_timestamps_token_id": tokens[NO_TIMES],
        "prev_sot_token_id": tokens[PREVIOUS],
        "is_multilingual": multilingual,
        "max_initial_timestamp_index": 50,
        "max_length": found.text_positions,
        "return_timestamps": False,
    }
    for key, hint in (
        ("suppress_tokens", "suppress_ids"),
        ("begin_suppress_tokens", "suppress_ids_begin"),
        ("alignment_heads", "alignment_heads"),
    ):
        if hint in hints:
            settings[key] = hints[hint]
    if multilingual:
        tasks = {f"<|{task}|>" for task in TASKS}
        first_task = min(tokens[task] for task in tasks)
        languages = {name: token for name, token in tokens.items() if tokens[START] < token < first_task}
        settings["lang_to_id"] = dict(languages)
        settings["task_to_id"] = {task: tokens[f"<|{task}|>"] for task in TASKS}
    return settings


def _tokenizer_config(found: Sizes) -> dict[str, JsonValue]:
    return {
        "tokenizer_class": "WhisperTokenizer",
        "processor_class": "WhisperProcessor",
        "model_max_length": found.text_positions,
        "bos_token": END,
        "eos_token": END,
        "pad_token": END,
        "unk_token": END,
        "add_prefix_space": False,
    }


def _preprocessor(found: Sizes) -> dict[str, JsonValue]:
    """Log-mel frames every 10 ms, two of them an audio position: 30 s for the 1,500 positions of every known model."""
    samples = found.audio_positions * 2 * HOP
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "WhisperProcessor",
        "feature_size": found.mel_bins,
        "sampling_rate": SAMPLING_RATE,
        "hop_length": HOP,
        "n_fft": FFT,
        "chunk_length": samples // SAMPLING_RATE,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": False,
    }


def _special_tokens(path: Path, vocabulary: int) -> dict[str, int]:
    """Name and id of each special token."""
    added = read_json(path).get("added_tokens")
    tokens: dict[str, int] = {}
    for entry in added if isinstance(added, list) else []:
        if isinstance(entry, dict) and isinstance(token := entry.get("id"), int):
            tokens[str(entry.get("content"))] = token
    needed = [START, END, NO_TIMES, PREVIOUS, *(f"<|{task}|>" for task in TASKS)]
    wrong = [name for name in needed if tokens.get(name, vocabulary) >= vocabulary]
    if wrong:
        raise UserError(
            f"{path}: lacks Whisper's special tokens {', '.join(wrong)}, or has ids for them beyond the model's "
            f"{vocabulary:,} tokens; expected the tokenizer of this very model"
        )
    return tokens


def _write(path: Path, value: dict[str, JsonValue]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
