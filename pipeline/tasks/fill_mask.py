"""Text encoders that say which token stands behind a mask: ``forward`` gives logits of every place.

S tokens of a call, V vocabulary. Output: ``logits`` float32 ``[1, S, V]``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from pydantic import JsonValue
from transformers import AutoModelForMaskedLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from pipeline.artifacts import Loaded, Quantized
from pipeline.cases import Output, identity_of, record_cases, spread_rows
from pipeline.config import BuildSettings
from pipeline.record import Recorded
from pipeline.tasks.settings import FILL_MASK as FILL_MASK_SETTINGS
from pipeline.tasks.task import Task
from pipeline.tasks.text_encoder import (
    ARGUMENTS,
    cases_of,
    has_texts,
    no_constants,
    plan_of,
    special_token_id,
    without_cache,
)
from runners.caller import LOGITS

_OUTPUT = Output(field="logits", name=LOGITS, kind="logits")


def _architectures() -> Collection[str]:
    names = MODEL_FOR_MASKED_LM_MAPPING_NAMES.items()
    return {name for model_type, name in names if model_type not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}


def _rows(loaded: Loaded) -> Callable[[torch.Tensor], torch.Tensor]:
    """The masked places of a text; without one, some places all over it."""
    mask = special_token_id(loaded.tokenizer, "mask_token")

    def rows(ids: torch.Tensor) -> torch.Tensor:
        masked = (ids == mask).nonzero().flatten() if mask is not None else ids[:0]
        places = masked if masked.numel() else torch.arange(len(ids))
        return places[spread_rows(len(places))]

    return rows


def _prepare(loaded: Loaded, settings: BuildSettings) -> JsonValue:
    return identity_of(cases_of(loaded, settings, _rows(loaded)))


def _record(
    loaded: Loaded, quantized: Quantized, settings: BuildSettings, _drafts: Sequence[torch.Tensor] | None
) -> Recorded:
    return record_cases(loaded, quantized, cases_of(loaded, settings, _rows(loaded)), ARGUMENTS, _OUTPUT)


FILL_MASK = Task(
    name="fill-mask",
    auto_model=AutoModelForMaskedLM,
    architectures=_architectures,
    needs_tokenizer=False,
    register=without_cache,
    plan=plan_of(_OUTPUT),
    constant_methods=no_constants,
    is_checked=has_texts,
    draft=None,
    record=_record,
    prepare=_prepare,
    settings=FILL_MASK_SETTINGS,
)
