"""Encoder-decoder models that transcribe recordings.

``encode`` takes what the model's feature extractor makes of a recording: ``input_features`` float32 ``[1, bands,
frames]`` of a fixed length, or ``input_values`` float32 ``[1, samples]``; the rest is in ``encoder_decoder.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from pydantic import JsonValue
from transformers import AutoModelForSpeechSeq2Seq, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES

from pipeline.artifacts import EncoderInput, Extras, Loaded, Quantized
from pipeline.config import BuildSettings, CacheSettings, CheckSettings
from pipeline.decoding import read_decoding
from pipeline.goldens import Prompt
from pipeline.preprocessor import read_audio_preprocessing
from pipeline.record import Recorded
from pipeline.record_answers import record_answers
from pipeline.tasks.answers import answers_of, beginning, identity
from pipeline.tasks.encoder_decoder import architectures, constant_methods, encoder_input, plan, registering
from pipeline.tasks.settings import SPEECH_TO_TEXT as SETTINGS
from pipeline.tasks.task import Task
from runners.errors import UserError
from runners.preprocessing import AudioPreprocessing, LogMel
from runners.speech import pieces
from runners.wav import read_wav

_SECONDS = 30  # of a piece, of a model that takes samples
_LEAST = 8  # an eighth of a second: what convolutions make one position of at least


def sample_limits(settings: AudioPreprocessing, cache: CacheSettings) -> tuple[int, int]:
    """Return the samples of a piece, at least and at most.

    Raises:
        UserError: the configuration gives a length, and the model's is fixed; or one that is too short.
    """
    wanted, shortest = cache.max_encoder_length, settings.sampling_rate // _LEAST
    if isinstance(settings, LogMel):
        if wanted is not None:
            raise UserError(
                f"cache.max_encoder_length: the model hears {settings.seconds:g} s at a time, no more and no less; "
                "remove it."
            )
        return settings.n_samples, settings.n_samples
    if wanted is not None and wanted < shortest:
        raise UserError(f"cache.max_encoder_length: {wanted} samples are too few; give {shortest} or more.")
    return shortest, wanted or _SECONDS * settings.sampling_rate


def prompts_of(loaded: Loaded, settings: BuildSettings) -> list[Prompt]:
    """Return a prompt for each piece of the check's recordings.

    Raises:
        UserError: a file cannot be read, or the answers do not fit the cache.
    """
    audio, begin = loaded.extras.audio, beginning(loaded, settings)
    assert audio is not None
    limits, name = sample_limits(audio, settings.cache), loaded.model.main_input_name
    prompts = []
    for number, path in enumerate(settings.check.audio):
        found = pieces(read_wav(path), audio, *limits)
        for piece, features in enumerate(found):
            label = f"{number}" if len(found) == 1 else f"{number}.{piece}"
            prompts.append(Prompt(label, path.name, begin, encoder={name: features}))
    return prompts


def _architectures() -> Collection[str]:
    return architectures(MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES)


def _encoder(quantized: Quantized, settings: CacheSettings) -> EncoderInput:
    audio, model = quantized.extras.audio, quantized.model
    assert audio is not None
    shortest, longest = sample_limits(audio, settings)
    if isinstance(audio, LogMel):
        silence, least = torch.zeros(1, audio.feature_size, audio.frames), None
    else:
        silence, least = torch.zeros(1, longest), shortest
    return encoder_input(model, model.main_input_name, silence, least)


def _extras(folder: Path | None, config: PreTrainedConfig) -> Extras:
    if folder is None:
        raise UserError("model.source: a speech model is a folder with its preprocessor's file, not one file.")
    return Extras(decoding=read_decoding(folder, config), audio=read_audio_preprocessing(folder))


def _is_checked(check: CheckSettings) -> bool:
    return bool(check.audio)


def _prepare(loaded: Loaded, settings: BuildSettings) -> JsonValue:
    return identity(prompts_of(loaded, settings), answers_of(loaded, settings))


def _record(
    loaded: Loaded, quantized: Quantized, settings: BuildSettings, _drafts: Sequence[torch.Tensor] | None
) -> Recorded:
    return record_answers(loaded, quantized, prompts_of(loaded, settings), answers_of(loaded, settings))


SPEECH_TO_TEXT = Task(
    name="speech-to-text",
    auto_model=AutoModelForSpeechSeq2Seq,
    architectures=_architectures,
    needs_tokenizer=True,
    register=registering(_encoder),
    plan=plan,
    constant_methods=constant_methods,
    is_checked=_is_checked,
    draft=None,
    record=_record,
    prepare=_prepare,
    extras=_extras,
    settings=SETTINGS,
)
