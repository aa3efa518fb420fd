"""The check of the tasks of encoder-decoder models: what its answers begin with, and how they are recorded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import JsonValue

from pipeline.artifacts import Loaded
from pipeline.cases import Case, identity_of
from pipeline.config import BuildSettings
from pipeline.goldens import Prompt
from pipeline.record_answers import Answers
from pipeline.tasks.encoder_decoder import max_length
from runners.errors import UserError


def beginning(loaded: Loaded, settings: BuildSettings) -> torch.Tensor:
    """Return the tokens that each answer begins with, int64 ``[n]``.

    Raises:
        UserError: they and the steps of the check do not fit the decoder's cache.
    """
    assert loaded.extras.decoding is not None
    begin, length = loaded.extras.decoding.prompt, max_length(loaded.model, settings.cache)
    if len(begin) + settings.check.steps - 1 > length:  # the last token is never fed
        raise UserError(
            f"check.steps: {len(begin)} tokens that an answer begins with and {settings.check.steps} steps do not fit "
            f"the cache of {length} (cache.max_length); take fewer steps."
        )
    return torch.tensor(begin, dtype=torch.int64)


def answers_of(loaded: Loaded, settings: BuildSettings) -> Answers:
    """Return how the check's answers are recorded."""
    assert loaded.extras.decoding is not None and loaded.tokenizer is not None
    ends = frozenset(loaded.tokenizer.info.eos_ids)
    return Answers(loaded.model.main_input_name, loaded.extras.decoding, settings.check.steps, ends)


def identity(prompts: Sequence[Prompt], answers: Answers) -> JsonValue:
    """Return what tells recordings of these prompts from others."""
    inputs = identity_of([Case(prompt.name, prompt.text, prompt.encoder, prompt.ids) for prompt in prompts])
    return [inputs, answers.decoding.model_dump(mode="json")]
