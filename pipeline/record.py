"""Stage: what eager PyTorch says along the prompts of the check, of both models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from pipeline.artifacts import Loaded, LoadedTokenizer, Quantized
from pipeline.config import CheckSettings
from pipeline.experts import experts_one_by_one
from pipeline.goldens import (
    Prompt,
    assemble,
    full_logits,
    mean_nll,
    record,
    record_forced,
    rounding_of,
    tokens_of,
)
from pipeline.prompts import prompts_of, text_ids
from pipeline.quantization.reference import quantizes_activations, reference_of
from runners.check import FullLogits
from runners.goldens import Goldens, GoldenText


@dataclass(frozen=True)
class Recorded:
    """The goldens of a package, and both references' logits over the whole vocabulary."""

    goldens: Goldens
    full: FullLogits


def record_goldens(
    loaded: Loaded,
    quantized: Quantized,
    tokenizer: LoadedTokenizer,
    settings: CheckSettings,
    max_length: int,
    drafts: Sequence[torch.Tensor] | None = None,
) -> Recorded:
    """Run both models along the check's prompts and text.

    Args:
        loaded: The source's model.
        quantized: The package's.
        tokenizer: Gives the prompts and the tokens that end an answer.
        settings: Prompts, steps and text.
        max_length: Of the cache.
        drafts: A guess of each prompt's tokens, int64 [1 to steps], in the order of :func:`prompts_of`.

    Raises:
        UserError: a prompt does not fit, or the text cannot be read.
    """
    prompts = prompts_of(settings, tokenizer, max_length)
    ids = text_ids(settings, tokenizer)
    text = ids[: settings.perplexity.tokens] if ids is not None and settings.perplexity is not None else None
    window = settings.perplexity.window if settings.perplexity is not None else 0
    greedy = Greedy(settings.steps, frozenset(tokenizer.info.eos_ids), drafts)
    return record_along(loaded.model, quantized.model, prompts, greedy, text, window)


@dataclass(frozen=True)
class Greedy:
    """How the prompts are continued."""

    steps: int
    eos_ids: frozenset[int]
    drafts: Sequence[torch.Tensor] | None = None  # a guess for each prompt, int64 [1 to steps]


def record_along(
    source: PreTrainedModel,
    quantized: PreTrainedModel,
    prompts: list[Prompt],
    greedy: Greedy,
    text: torch.Tensor | None = None,
    window: int = 0,
) -> Recorded:
    """Run both models along ``prompts`` and over ``text`` (int64 ``[n]``) in windows of ``window`` tokens."""
    reference = reference_of(quantized)
    ours = record(reference, prompts, greedy.steps, greedy.eos_ids, greedy.drafts, keep_logits=True)
    our_nll = mean_nll(reference, text, window) if text is not None else 0.0
    rounding = None
    if quantizes_activations(quantized):
        precise = reference_of(reference, torch.float64)  # of weights that are unpacked already
        with experts_one_by_one(precise):
            rounding = rounding_of(precise, prompts, ours)
        del precise
    del reference
    theirs = record_forced(source, prompts, tokens_of(ours), keep_logits=True)
    golden_text = None
    if text is not None:
        golden_text = GoldenText(text, window, our_nll, mean_nll(source, text, window))
    return Recorded(assemble(prompts, ours, theirs, golden_text, rounding), full_logits(prompts, ours, theirs))
