"""One answer: prefill the prompt, then choose and feed token after token until something ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from time import perf_counter
from typing import Protocol

import torch

from runners.session import ContextEndError


class Finish(Enum):
    """Why an answer ended."""

    EOS = "the model ended its answer"
    LENGTH = "--max-new-tokens was reached"
    CONTEXT = "the context is full"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Answer:
    """The tokens of an answer (an end-of-sequence token is not one of them) and what they took."""

    tokens: tuple[int, ...]
    finish: Finish
    prompt_tokens: int  # prefilled now, without what the cache already held
    prefill_seconds: float  # until the first token was chosen
    decode_seconds: float
    steps: int  # tokens fed one by one during ``decode_seconds``


class Decoder(Protocol):
    """What tokens are fed to: a session, of whichever kind of model."""

    @property
    def position(self) -> int:
        """Tokens in the cache."""

    def prefill(self, ids: Sequence[int]) -> torch.Tensor:
        """Append tokens; float32 [V]: logits after the last one."""

    def step(self, token: int) -> torch.Tensor:
        """Append one token; the same."""


def generate(
    session: Decoder,
    prompt: Sequence[int],
    choose: Callable[[torch.Tensor], int],
    *,
    eos_ids: frozenset[int],
    max_new_tokens: int,
    emit: Callable[[int], None],
    stopped: Callable[[], bool] = lambda: False,
) -> Answer:
    """Continue the session's tokens with ``prompt`` and an answer.

    Args:
        session: a session; what its cache holds stays in front of the prompt.
        prompt: ids to append, at least one.
        choose: the next token for float32 [V] logits, such as a ``Sampler``.
        eos_ids: tokens that end the answer.
        max_new_tokens: tokens of the answer at most, 1 or more.
        emit: called with each token of the answer as soon as it is chosen.
        stopped: asked before each step; true ends the answer.

    Raises:
        UserError: the prompt is empty or does not fit.
    """
    start = perf_counter()
    token = choose(session.prefill(prompt))
    first = perf_counter()
    before = session.position
    tokens: list[int] = []
    while True:
        if token in eos_ids:
            finish = Finish.EOS
            break
        tokens.append(token)
        emit(token)
        if len(tokens) >= max_new_tokens:
            finish = Finish.LENGTH
            break
        if stopped():
            finish = Finish.STOPPED
            break
        try:
            token = choose(session.step(token))
        except ContextEndError:
            finish = Finish.CONTEXT
            break
    seconds = perf_counter() - first
    return Answer(tuple(tokens), finish, len(prompt), first - start, seconds, session.position - before)
