"""Stage: what eager PyTorch says along the prompts of the check, of both models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from pipeline.artifacts import Loaded, LoadedTokenizer, Quantized
from pipeline.config import CheckSettings
from pipeline.goldens import Prompt, assemble, full_logits, mean_nll, record, record_forced, tokens_of
from pipeline.prompts import prompts_of, text_ids
from pipeline.quantization.reference import reference_of
from runners.check import FullLogits
from runners.goldens import Goldens, GoldenText


@dataclass(frozen=True)
class Recorded:
    """The goldens of a package, and both references' logits over the whole vocabulary."""

    goldens: Goldens
    full: FullLogits


def record_goldens(
    loaded: Loaded, quantized: Quantized, tokenizer: LoadedTokenizer, settings: CheckSettings, max_length: int
) -> Recorded:
    """Run both models along the check's prompts and text.

    Raises:
        UserError: a prompt does not fit, or the text cannot be read.
    """
    prompts = prompts_of(settings, tokenizer, max_length)
    ids = text_ids(settings, tokenizer)
    text = ids[: settings.perplexity.tokens] if ids is not None and settings.perplexity is not None else None
    window = settings.perplexity.window if settings.perplexity is not None else 0
    return record_along(loaded.model, quantized.model, prompts, settings.steps, text, window)


def record_along(
    source: PreTrainedModel,
    quantized: PreTrainedModel,
    prompts: list[Prompt],
    steps: int,
    text: torch.Tensor | None = None,
    window: int = 0,
) -> Recorded:
    """Run both models along ``prompts``, ``steps`` tokens each, and over ``text`` (int64 ``[n]``) in windows."""
    reference = reference_of(quantized)
    ours = record(reference, prompts, steps, keep_logits=True)
    theirs = record_forced(source, prompts, tokens_of(ours), keep_logits=True)
    golden_text = None
    if text is not None:
        golden_text = GoldenText(text, window, mean_nll(reference, text, window), mean_nll(source, text, window))
    return Recorded(assemble(prompts, ours, theirs, golden_text), full_logits(prompts, ours, theirs))
