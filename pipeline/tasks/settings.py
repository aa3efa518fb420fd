"""Which settings a task has a use for: one that it would ignore is refused, not ignored."""

from __future__ import annotations

from collections.abc import Collection

from pydantic import BaseModel

from pipeline.config import BuildSettings, CacheSettings, CheckSettings
from runners.errors import UserError
from runners.manifest import TaskName

_PROMPTS = {"check.prompts", "check.to_the_end", "quantize.calibration", "quantize.embedding"}


def _limits(*names: str) -> set[str]:
    return {f"check.{against}.{name}" for against in ("quantized", "unquantized") for name in names}


DECODER = frozenset(
    {f"cache.{name}" for name in CacheSettings.model_fields if name != "max_encoder_length"}
    | {"export.methods", "export.max_draft_tokens", "export.max_prefill_length", "export.logits", "export.top_k"}
    | {"export.attention"}
    | {"check.chat", "check.long_prompt", "check.steps", "check.perplexity"}
    | _PROMPTS
    | _limits("min_equal_prompts", "max_margin", "max_logit_difference", "max_mean_kl", "max_perplexity_ratio")
    | {"check.quantized.max_kl_over_rounding", "quantize.lm_head"}
)
_ENCODER_DECODER = (
    frozenset({"cache.max_length", "cache.max_encoder_length", "export.max_prefill_length", "export.logits"})
    | {"check.steps", "check.quantized.max_kl_over_rounding", "quantize.lm_head"}
    | _limits("min_equal_prompts", "max_margin", "max_logit_difference", "max_mean_kl")
)
SPEECH_TO_TEXT = _ENCODER_DECODER | {"check.audio", "quantize.embedding"}
TEXT2TEXT = _ENCODER_DECODER | {"check.prompts"}
TEXT_ENCODER = frozenset({"export.max_length", "check.token_ids"} | _PROMPTS | _limits("max_output_difference"))
EMBEDDING = TEXT_ENCODER | _limits("min_cosine")
FILL_MASK = TEXT_ENCODER | _limits("min_equal_top1", "min_equal_top5") | {"quantize.lm_head"}
IMAGE = frozenset({"check.images"} | _limits("max_output_difference", "min_equal_top1", "min_equal_top5"))
IMAGE_TEXT_TO_TEXT = (DECODER | {"check.images"}) - {
    "cache.batch_size",
    "export.methods",
    "export.max_draft_tokens",
    "export.top_k",
}

_ALL = DECODER | SPEECH_TO_TEXT | TEXT2TEXT | EMBEDDING | FILL_MASK | IMAGE
_ACCEPTED = {"export.attention"}  # tasks that have one way alone say themselves which values name it


def reads(used: Collection[str], key: str) -> bool:
    """Whether a task that reads ``used``, of the keys that some tasks read and others do not, reads ``key``."""
    return key in used or key not in _ALL


def refuse_idle(settings: BuildSettings, task: TaskName, used: Collection[str]) -> None:
    """Refuse what the configuration sets and the task does not read.

    Args:
        settings: of the build.
        task: its name, for the message.
        used: dotted keys that the task reads, of those that some tasks read and others do not.

    Raises:
        UserError: it names the first such key.
    """
    idle = next((key for key in sorted(_ALL - _ACCEPTED - set(used)) if _is_given(settings, key)), None)
    if idle is not None:
        raise UserError(
            f"{idle}: has no effect on a model for {task}; remove it"
            f"{', or name another task in model.task' if settings.model.task is not None else ''}"
        )


def refuse_unmeasured(check: CheckSettings) -> None:
    """Refuse limits where the check has nothing to compare.

    Raises:
        UserError: it names the first limit.
    """
    for against in ("quantized", "unquantized"):
        for name, limit in getattr(check, against):
            if limit is not None:
                raise UserError(
                    f"check.{against}.{name}: there is nothing to compare; give check.prompts or check.token_ids, or "
                    "remove the limit"
                )


def _is_given(settings: BuildSettings, key: str) -> bool:
    """Whether the configuration writes the key, and not only to unset what a file that it extends had set."""
    section: object = settings
    for name in key.split("."):
        if not isinstance(section, BaseModel) or name not in section.model_fields_set:
            return False
        section = getattr(section, name)
    return not (section is None or section is False or section in ((), "none"))
