"""Choosing the next token. V vocabulary.

Greedy by default (temperature 0): the tokens that the check verified, the same on every run. transformers is greedy by
default too unless the model's ``generation_config`` says otherwise; llama.cpp's command samples by default (temperature
0.8, top-k 40, top-p 0.95, min-p 0.05): give these numbers to compare with it. The filters apply in transformers' order:
temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass

import torch

from runners.choices import Choices, Row, likeliest
from runners.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

    Raises:
        UserError: a value lies outside its range.
    """

    temperature: float = 0.0  # 0: the largest logit; above: divides the logits
    top_k: int = 0  # keep this many of the largest logits; 0: all
    top_p: float = 1.0  # keep the fewest tokens whose probabilities reach this sum; 1: all
    min_p: float = 0.0  # drop tokens below this share of the largest probability; 0: none
    seed: int | None = None  # None: another one each time

    def __post_init__(self) -> None:
        _require("temperature", self.temperature, 0 <= self.temperature < float("inf"), "0 or more (0: greedy)")
        _require("top-k", self.top_k, self.top_k >= 0, "0 or more (0: all tokens)")
        _require("top-p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1 (1: all tokens)")
        _require("min-p", self.min_p, 0 <= self.min_p <= 1, "0 to 1 (0: all tokens)")
        _require("seed", self.seed, self.seed is None or 0 <= self.seed < 1 << 63, "0 or more, below 2**63")


def _require(name: str, value: float | None, valid: bool, expected: str) -> None:
    if not valid:
        raise UserError(f"--{name} is {value}; expected {expected}.")


class Sampler:
    """Draws tokens by one :class:`Sampling` with a random generator of its own."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        self._generator = torch.Generator().manual_seed(seed)

    @property
    def seed(self) -> int:
        """The seed in use; giving it again repeats the draws."""
        return int(self._generator.initial_seed())

    def __call__(self, row: Row) -> int:
        """The next token for float32 [V] logits, or one of the likeliest: what is drawn from has these alone."""
        if self._sampling.temperature == 0:
            return greedy(row)
        logits = row.logits if isinstance(row, Choices) else row
        place = int(torch.multinomial(probabilities(logits, self._sampling), 1, generator=self._generator))
        return int(row.ids[place]) if isinstance(row, Choices) else place


def greedy(row: Row) -> int:
    """The id of the largest of float32 [V] logits, the lowest id of equals; or the first of the likeliest tokens.

    Raises:
        RuntimeError: the logits hold NaN: the program is broken.
    """
    token, logit = likeliest(row)
    if math.isnan(logit):
        raise RuntimeError("the program computed NaN logits: run 'pteline check' on the package")
    return token


def probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Probabilities float32 [V] after temperature and filters, for a temperature above 0. ``logits`` is unchanged.

    Raises:
        RuntimeError: the logits hold NaN: the program is broken.
    """
    # Less the largest first, so that a tiny temperature cannot overflow to infinity.
    scaled = (logits - logits[greedy(logits)]) / sampling.temperature
    scaled = _keep_top_k(scaled, sampling.top_k)
    scaled = _keep_top_p(scaled, sampling.top_p)
    scaled = _keep_min_p(scaled, sampling.min_p)
    return torch.softmax(scaled, dim=-1)


def _keep_top_k(scaled: torch.Tensor, top_k: int) -> torch.Tensor:
    if top_k == 0 or top_k >= len(scaled):
        return scaled
    values, ids = torch.topk(scaled, top_k)
    return torch.full_like(scaled, -torch.inf).scatter_(0, ids, values)


def _keep_top_p(scaled: torch.Tensor, top_p: float) -> torch.Tensor:
    if top_p == 1:
        return scaled
    ordered, ids = torch.sort(scaled, descending=True, stable=True)
    weights = torch.softmax(ordered, dim=-1)
    before = torch.cumsum(weights, dim=-1) - weights
    before[0] = 0.0  # the largest always stays, whatever the rounding
    kept = torch.where(before < top_p, ordered, -torch.inf)
    return torch.empty_like(scaled).scatter_(0, ids, kept)


def _keep_min_p(scaled: torch.Tensor, min_p: float) -> torch.Tensor:
    if min_p == 0:
        return scaled
    weights = torch.softmax(scaled, dim=-1)
    return torch.where(weights >= min_p * weights.max(), scaled, -torch.inf)
