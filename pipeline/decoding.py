"""How the answers of an encoder-decoder model begin and what they never hold, as its generation config says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar, cast

from transformers import GenerationConfig, PreTrainedConfig

from runners.errors import UserError
from runners.manifest import Decoding

GENERATION_CONFIG = "generation_config.json"
T = TypeVar("T")
_LANGUAGE, _TASK = "en", "transcribe"  # of a multilingual Whisper whose files name none


def read_decoding(folder: Path | None, config: PreTrainedConfig) -> Decoding:
    """What ``generate`` of transformers would begin with and leave out.

    Args:
        folder: of the model; None, or without a generation config: the model's own config says it.
        config: of the model.

    Raises:
        UserError: the file cannot be read, or no token begins an answer.
    """
    generation = _generation_config(folder, config)
    first: int | None = _either(generation, config, "decoder_start_token_id", generation.bos_token_id)
    if first is None:
        raise UserError(
            f"{folder or 'model'}: neither {GENERATION_CONFIG} nor config.json names a decoder_start_token_id, with "
            "which an answer begins; add it."
        )
    words: list[list[int]] = _either(generation, config, "bad_words_ids", [])
    never: list[int] = _either(generation, config, "suppress_tokens", [])
    never = [*never, *(word[0] for word in words if len(word) == 1)]
    not_first: list[int] = _either(generation, config, "begin_suppress_tokens", [])
    return Decoding(
        prompt=[first, *_forced(generation, config)],
        suppressed=sorted({token for token in never if token >= 0}),  # -1 stands for a list of its own in old files
        suppressed_first=sorted(set(not_first)),
    )


def _forced(generation: GenerationConfig, config: PreTrainedConfig) -> list[int]:
    """The tokens that follow the first: Whisper's language, task and mode, or a translator's language."""
    given: list[tuple[int, int | None]] = _either(generation, config, "forced_decoder_ids", [])
    tokens = [token for _, token in sorted(given) if token is not None]
    languages, tasks = getattr(generation, "lang_to_id", None), getattr(generation, "task_to_id", None)
    if languages and tasks:
        language = (getattr(generation, "language", None) or _LANGUAGE).strip("<|>")
        tokens = [languages[f"<|{language}|>"], tasks[getattr(generation, "task", None) or _TASK]]
    silent = getattr(generation, "no_timestamps_token_id", None)
    if silent is not None and silent not in tokens:
        tokens.append(silent)
    begins: int | None = _either(generation, config, "forced_bos_token_id", None)
    return tokens if begins is None or tokens else [begins]


def _either(generation: GenerationConfig, config: PreTrainedConfig, name: str, default: T) -> T:
    """A setting of the generation config, or of the model's config, where old files have it."""
    for holder in (generation, config):
        found = getattr(holder, name, None)
        if found is not None:
            return cast(T, found)
    return default


def _generation_config(folder: Path | None, config: PreTrainedConfig) -> GenerationConfig:
    path = folder / GENERATION_CONFIG if folder is not None else None
    if path is None or not path.is_file():
        return GenerationConfig.from_model_config(config)
    try:
        return GenerationConfig.from_dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
