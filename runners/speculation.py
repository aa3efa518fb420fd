"""Prompt-lookup speculation: several tokens a call where the answer repeats what stood in the prompt or in itself.

What followed the last few tokens when they occurred before is a guess of what follows now (no model makes it: Saxena,
"Prompt Lookup Decoding", 2023). One call of ``verify`` computes the logits after each guessed token. Guesses are kept
as long as each is the likeliest token after the one before it; the first that is not is replaced by that token, and
what was written behind it is taken back. So every token is the greedy choice by the program's own logits, whatever the
guess.

Those logits are of a call of several tokens. Custom attention adds up in another order there than in a call of one
token: where two tokens are nearly tied, plain decoding may choose the other one (docs/contract.md).

n tokens of a call, V vocabulary, K most tokens of a draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from runners.choices import Row
from runners.errors import UserError
from runners.package import Package
from runners.sampling import greedy

LONGEST_MATCH, SHORTEST_MATCH = 4, 2  # tokens that must have occurred before; of one alone the guess is mostly wrong
PRICE = 0.25  # of judging a guessed token, in steps; a right guess saves a step
FIRST_DRAFT = 2
FIRST_BALANCE, LARGEST_BALANCE = 1.0, 2.0  # steps
SHORTEST_REST, LONGEST_REST = 16, 128  # tokens


def require_speculation(package: Package) -> None:
    """Refuse a package that cannot speculate.

    Raises:
        UserError: it has no method ``verify``, or a cache that cannot take back single tokens.
    """
    manifest = package.manifest
    if manifest.cache is not None and any(tensor.kind != "full" for tensor in manifest.cache.tensors):
        raise UserError(
            f"package '{manifest.name}' cannot --speculate: its cache has sliding windows or recurrent states, which "
            "cannot take back tokens that were guessed wrong. Leave --speculate out."
        )
    if "verify" not in manifest.methods:
        raise UserError(
            f"package '{manifest.name}' cannot --speculate: it has no method verify, only "
            f"{', '.join(manifest.methods) or 'none'}. Build it with export.methods: [forward, verify], or leave "
            "--speculate out."
        )


class VerifyingSession(Protocol):
    """What speculation needs of a session."""

    @property
    def position(self) -> int:
        """Tokens in the cache."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The ids in the cache."""

    @property
    def max_length(self) -> int:
        """Tokens that the cache can hold."""

    @property
    def max_verify(self) -> int:
        """K + 1."""

    def step(self, token: int) -> Row:
        """Append one token; float32 [V] after it, or choices. Raises ``ContextEndError`` where the cache is full."""

    def verify(self, ids: Sequence[int]) -> Row:
        """Append 1 to K + 1 tokens; float32 [n, V] after each, or choices."""

    def rewind(self, position: int) -> int:
        """Forget the tokens from ``position`` on."""


@dataclass(frozen=True)
class Acceptance:
    """What the guesses of an answer were worth."""

    calls: int  # of the program, with and without a draft
    drafted: int  # tokens
    accepted: int  # of them


class Lookup:
    """A sequence that knows where its last tokens occurred before."""

    def __init__(self, longest: int = LONGEST_MATCH, shortest: int = SHORTEST_MATCH) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._tokens: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}  # some tokens -> where what followed them last begins

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        for token in tokens:
            # Only now does the end have a token behind it: before, it would find itself.
            for size in self._sizes:
                if size <= len(self._tokens):
                    self._behind[tuple(self._tokens[-size:])] = len(self._tokens)
            self._tokens.append(token)

    def draft(self, most: int) -> list[int]:
        """What followed when the last tokens occurred last: 0 or ``most`` tokens, by the longest match.

        Where that reaches the end of the sequence it goes on with the draft itself, as a repetition does.
        """
        for size in self._sizes:
            start = self._behind.get(tuple(self._tokens[-size:])) if size <= len(self._tokens) else None
            if start is not None:
                known = self._tokens[start : start + most]
                return [known[index % len(known)] for index in range(most)]
        return []


class Pace:
    """How many tokens the next draft may have, so that text without repetitions is not slowed down.

    A balance is kept in steps: a guess that is right saves one, each guess costs ``PRICE``. While the balance is not
    below zero, drafts are made: twice as long after one that was all right, half as long after one of which less than
    half was. Below zero none is made for ``SHORTEST_REST`` tokens; then one token is tried, and each time that this
    fails the rest is twice as long, up to ``LONGEST_REST``. So guesses that are all wrong cost about ``FIRST_BALANCE``
    steps an answer, and later ``PRICE`` steps a rest; the balance is capped, so that a text that stops repeating itself
    is noticed as soon.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._length = min(FIRST_DRAFT, most)
        self._balance = FIRST_BALANCE
        self._rest = SHORTEST_REST
        self._waits = 0  # tokens until drafts are made again

    @property
    def length(self) -> int:
        """Tokens of the next draft; 0: none is to be made."""
        return 0 if self._waits else self._length

    def note(self, drafted: int, accepted: int) -> None:
        """Learn what a call did that judged ``drafted`` tokens, 0 or more."""
        if drafted == 0:
            self._waits = max(0, self._waits - 1)
            return
        if accepted == drafted:
            self._length = min(2 * self._length, self._most)
        elif 2 * accepted < drafted:
            self._length = max(1, self._length // 2)
        gain = accepted - PRICE * drafted
        self._balance = min(self._balance + gain, LARGEST_BALANCE)
        if gain > 0:
            self._rest = SHORTEST_REST
        if self._balance < 0:
            self._waits, self._rest = self._rest, min(2 * self._rest, LONGEST_REST)
            self._balance, self._length = 0.0, 1


class Speculation:
    """Greedy choice of the tokens of one answer, several a call where guesses are right."""

    def __init__(self, session: VerifyingSession) -> None:
        """For one answer, whose prompt is not yet in the session."""
        self._session = session
        self._lookup = Lookup()
        self._pace = Pace(session.max_verify - 1)
        self._calls = self._drafted = self._accepted = 0

    def begin(self) -> None:
        """Look things up in what the session holds now: the prompt and all before it."""
        self._lookup.extend(self._session.tokens)

    @property
    def acceptance(self) -> Acceptance:
        """What the guesses were worth up to now."""
        return Acceptance(self._calls, self._drafted, self._accepted)

    def advance(self, token: int, most: int) -> list[int]:
        """Feed the token chosen last and a draft of what follows it.

        Args:
            token: the token to feed.
            most: tokens wanted at most, 1 or more.

        Returns:
            1 to ``most`` tokens that follow. The cache holds them all but the last.

        Raises:
            ContextEndError: the cache is full.
        """
        self._lookup.extend([token])
        start = self._session.position
        room = self._session.max_length - start - 1
        length = min(self._pace.length, room, most - 1)
        draft = self._lookup.draft(length) if length > 0 else []
        chosen = self._verified(token, draft) if draft else [greedy(self._session.step(token))]
        self._session.rewind(start + len(chosen))
        self._lookup.extend(chosen[:-1])
        self._count(len(draft), len(chosen) - 1)
        return chosen

    def end(self, position: int) -> None:
        """Forget what was written at ``position`` and beyond: right guesses behind the end of the answer."""
        self._session.rewind(min(position, self._session.position))

    def _verified(self, token: int, draft: Sequence[int]) -> list[int]:
        """The tokens of the draft that are the likeliest, up to the first that is not, and the one in its place."""
        logits = self._session.verify([token, *draft])
        chosen = [greedy(logits[0])]
        for place, guess in enumerate(draft, 1):
            if guess != chosen[-1]:
                break
            chosen.append(greedy(logits[place]))
        return chosen

    def _count(self, drafted: int, accepted: int) -> None:
        self._calls += 1
        self._drafted += drafted
        self._accepted += accepted
        self._pace.note(drafted, accepted)
