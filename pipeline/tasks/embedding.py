"""Text encoders whose hidden states become one vector a text: ``forward`` gives the states, the runner pools them.

S tokens of a call, D width. Output: ``hidden`` float32 ``[1, S, D]``, the last hidden states.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from pydantic import JsonValue
from transformers import AutoModel, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from pipeline.artifacts import Extras, Loaded, Quantized
from pipeline.cases import Output, identity_of, record_cases
from pipeline.config import BuildSettings
from pipeline.pooling import read_pooling
from pipeline.record import Recorded
from pipeline.tasks.settings import EMBEDDING as EMBEDDING_SETTINGS
from pipeline.tasks.task import Task
from pipeline.tasks.text_encoder import ARGUMENTS, cases_of, has_texts, no_constants, plan_of, without_cache
from runners.caller import HIDDEN
from runners.preprocessing import Pooling

_OUTPUT = Output(field="last_hidden_state", name=HIDDEN, kind="hidden")


def _architectures() -> Collection[str]:
    """The bare model of every type that transformers can train to fill masks, but those with a decoder."""
    types = set(MODEL_FOR_MASKED_LM_MAPPING_NAMES) - set(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    named = (MODEL_MAPPING_NAMES.get(model_type) for model_type in types)
    return {name for name in named if isinstance(name, str)}


def _extras(folder: Path | None, _config: PreTrainedConfig) -> Extras:
    return Extras(pooling=read_pooling(folder) if folder is not None else Pooling(mode="mean", normalize=False))


def _every_row(ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(ids))


def _prepare(loaded: Loaded, settings: BuildSettings) -> JsonValue:
    return identity_of(cases_of(loaded, settings, _every_row))


def _record(
    loaded: Loaded, quantized: Quantized, settings: BuildSettings, _drafts: Sequence[torch.Tensor] | None
) -> Recorded:
    return record_cases(loaded, quantized, cases_of(loaded, settings, _every_row), ARGUMENTS, _OUTPUT)


EMBEDDING = Task(
    name="embedding",
    auto_model=AutoModel,
    architectures=_architectures,
    needs_tokenizer=False,
    register=without_cache,
    plan=plan_of(_OUTPUT),
    constant_methods=no_constants,
    is_checked=has_texts,
    draft=None,
    record=_record,
    prepare=_prepare,
    extras=_extras,
    settings=EMBEDDING_SETTINGS,
    unread=("pooler.",),
)
