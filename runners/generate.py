"""One answer: prefill the prompt, then choose and feed token after token until something ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from time import perf_counter
from typing import Protocol

from runners.choices import Row
from runners.session import ContextEndError
from runners.speculation import Acceptance, Speculation


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
    steps: int  # tokens fed during ``decode_seconds``
    acceptance: Acceptance | None = None  # None: they were fed one by one


class Decoder(Protocol):
    """What tokens are fed to: a session, of whichever kind of model."""

    @property
    def position(self) -> int:
        """Tokens in the cache."""

    def prefill(self, ids: Sequence[int]) -> Row:
        """Append tokens; float32 [V]: logits after the last one, or the likeliest tokens."""

    def step(self, token: int) -> Row:
        """Append one token; the same."""


def generate(
    session: Decoder,
    prompt: Sequence[int],
    choose: Callable[[Row], int],
    *,
    eos_ids: frozenset[int],
    max_new_tokens: int,
    emit: Callable[[int], None],
    stopped: Callable[[], bool] = lambda: False,
    speculation: Speculation | None = None,
) -> Answer:
    """Continue the session's tokens with ``prompt`` and an answer.

    Args:
        session: a session; what its cache holds stays in front of the prompt.
        prompt: ids to append, at least one.
        choose: the next token of what the session gives, such as a ``Sampler``.
        eos_ids: tokens that end the answer.
        max_new_tokens: tokens of the answer at most, 1 or more.
        emit: called with each token of the answer as soon as it is chosen.
        stopped: asked before each step; true ends the answer.
        speculation: a new one of this session; it chooses all tokens but the first, greedily.

    Raises:
        UserError: the prompt is empty or does not fit.
    """
    start = perf_counter()
    chosen = [choose(session.prefill(prompt))]
    first = perf_counter()
    before = session.position
    tokens: list[int] = []
    if speculation is not None:
        speculation.begin()
    while (finish := _take(chosen, tokens, eos_ids, max_new_tokens, emit)) is None:
        if stopped():
            finish = Finish.STOPPED
            break
        try:
            if speculation is not None:
                chosen = speculation.advance(tokens[-1], max_new_tokens - len(tokens))
            else:
                chosen = [choose(session.step(tokens[-1]))]
        except ContextEndError:
            finish = Finish.CONTEXT
            break
    if speculation is not None:
        speculation.end(before + len(tokens))
    seconds = perf_counter() - first
    acceptance = speculation.acceptance if speculation is not None else None
    return Answer(tuple(tokens), finish, len(prompt), first - start, seconds, session.position - before, acceptance)


def _take(
    chosen: Sequence[int],
    tokens: list[int],
    eos_ids: frozenset[int],
    max_new_tokens: int,
    emit: Callable[[int], None],
) -> Finish | None:
    """Append what was chosen to the answer's tokens, up to what ends it; None: nothing does."""
    for token in chosen:
        if token in eos_ids:
            return Finish.EOS
        tokens.append(token)
        emit(token)
        if len(tokens) >= max_new_tokens:
            return Finish.LENGTH
    return None
