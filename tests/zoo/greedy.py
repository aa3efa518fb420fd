"""Greedy steps of a program beside those of eager PyTorch, whatever the two were given before. V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

STEPS = 24  # greedy tokens after each prompt; windows of the zoo are 8 tokens, which every prompt so crosses
BOUND = 1e-4  # of any difference, in standard deviations of eager's output


class Speaker(Protocol):
    """A session of a program."""

    def prefill(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits ``[V]`` after the last of further tokens; valid until the next call."""


class Reference(Protocol):
    """The model by transformers alone."""

    def feed(self, ids: list[int]) -> torch.Tensor:
        """Logits ``[V]`` after the last of further tokens."""


def decoded(session: Speaker, eager: Reference, ids: list[int], steps: int) -> torch.Tensor:
    """Logits of the program, float32 ``[steps + 1, V]``, each held against eager's.

    Raises:
        AssertionError: says after which prompt and step they differ, and how.
    """
    said, fed = [], ids
    for step in range(steps + 1):
        logits = session.prefill(fed).clone()
        expected = eager.feed(fed)
        where = f"after a prompt of {len(ids)} tokens, at step {step}"
        difference = distance(logits, expected)
        assert difference < BOUND, f"{where}, logits differ by {difference:.2g} of their spread"
        best, second = expected.topk(2).values
        assert best - second > 2 * BOUND * expected.std(), f"{where}, eager's choice is a tie: take other weights"
        token = int(expected.argmax())
        assert int(logits.argmax()) == token, f"{where}, the program chooses {int(logits.argmax())}, eager {token}"
        said.append(logits)
        fed = [token]
    return torch.stack(said)


def replayed(session: Speaker, ids: list[int], said: torch.Tensor) -> torch.Tensor:
    """Logits of another session that is fed what ``said`` was fed."""
    tokens = [[int(logits.argmax())] for logits in said[:-1]]
    return torch.stack([session.prefill(fed).clone() for fed in (ids, *tokens)])


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of any value, in standard deviations of the expected ones."""
    return ((found - expected).abs().max() / expected.std()).item()


def random_ids(length: int, vocabulary: int) -> list[int]:
    """Token ids, none of them special, the same for the same length."""
    return torch.randint(3, vocabulary, (length,), generator=torch.Generator().manual_seed(length)).tolist()
