"""Encoder-decoder models from text to text: translation, summaries.

S tokens of an input. ``encode`` takes ``tokens`` int64 ``[1, S]``; the rest is in ``encoder_decoder.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from pydantic import JsonValue
from tokenizers import Tokenizer
from transformers import AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

from pipeline.artifacts import EncoderInput, Extras, Loaded, Quantized
from pipeline.config import BuildSettings, CacheSettings, CheckSettings
from pipeline.decoding import read_decoding
from pipeline.goldens import Prompt
from pipeline.record import Recorded
from pipeline.record_answers import record_answers
from pipeline.tasks.answers import answers_of, beginning, identity
from pipeline.tasks.encoder_decoder import (
    architectures,
    constant_methods,
    encoder_input,
    plan,
    registering,
)
from pipeline.tasks.settings import TEXT2TEXT as SETTINGS
from pipeline.tasks.task import Task
from runners.encoder_decoder import TOKENS
from runners.errors import UserError
from runners.tokenizer import TextCodec

_DEFAULT_LENGTH = 512  # tokens of an input, of a model that has positions without end


def longest_input(model: PreTrainedModel, settings: CacheSettings) -> int:
    """Return the most tokens of an input.

    Raises:
        UserError: the configuration asks for more than the model was made for.
    """
    limit = getattr(model.config.get_text_config(encoder=True), "max_position_embeddings", None)
    wanted = settings.max_encoder_length
    if limit is not None and wanted is not None and wanted > limit:
        raise UserError(
            f"cache.max_encoder_length: {wanted} tokens exceed the {limit} positions that the encoder was made for; "
            f"set it to {limit} or less."
        )
    return wanted or limit or _DEFAULT_LENGTH


def prompts_of(loaded: Loaded, settings: BuildSettings) -> list[Prompt]:
    """Return the check's texts, each with the tokens that an answer begins with.

    Raises:
        UserError: a text has no tokens or too many, or the answers do not fit the cache.
    """
    assert loaded.tokenizer is not None
    codec = TextCodec(Tokenizer.from_str(loaded.tokenizer.tokenizer_json), loaded.tokenizer.info)
    longest, begin = longest_input(loaded.model, settings.cache), beginning(loaded, settings)
    prompts = []
    for number, text in enumerate(settings.check.prompts):
        ids = codec.encode(text)
        if not 0 < len(ids) <= longest:
            raise UserError(
                f"check.prompts: entry {number} has {len(ids)} tokens; the encoder takes 1 to {longest} "
                "(cache.max_encoder_length). Shorten it."
            )
        prompts.append(Prompt(str(number), text, begin, encoder={TOKENS: torch.tensor([ids])}))
    return prompts


def _architectures() -> Collection[str]:
    return architectures(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)


def _encoder(quantized: Quantized, settings: CacheSettings) -> EncoderInput:
    longest = torch.ones(1, longest_input(quantized.model, settings), dtype=torch.int64)
    return encoder_input(quantized.model, TOKENS, longest, shortest=1)


def _extras(folder: Path | None, config: PreTrainedConfig) -> Extras:
    return Extras(decoding=read_decoding(folder, config))


def _is_checked(check: CheckSettings) -> bool:
    return bool(check.prompts)


def _prepare(loaded: Loaded, settings: BuildSettings) -> JsonValue:
    return identity(prompts_of(loaded, settings), answers_of(loaded, settings))


def _record(
    loaded: Loaded, quantized: Quantized, settings: BuildSettings, _drafts: Sequence[torch.Tensor] | None
) -> Recorded:
    return record_answers(loaded, quantized, prompts_of(loaded, settings), answers_of(loaded, settings))


TEXT2TEXT = Task(
    name="text2text",
    auto_model=AutoModelForSeq2SeqLM,
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
