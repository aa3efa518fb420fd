"""How far a program's logits lie from a reference's, in float64.

N steps, V vocabulary, T recorded logits of a step (``runners.goldens.TOP``). r is the reference, p the program.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from runners.goldens import Reference


@dataclass(frozen=True)
class StepFigures:
    """Figures of each step, float64 [N]."""

    max_difference: torch.Tensor  # largest |p - r| of the step
    mean_difference: torch.Tensor  # mean |p - r| of the step
    kl: torch.Tensor  # KL(r || p) in nats


def recorded_figures(program: torch.Tensor, reference: Reference) -> StepFigures:
    """Compare over the T recorded logits.

    KL takes the T recorded tokens one by one and all others as a single outcome:
    ``sum_i R_i (ln R_i - ln P_i) + R' (ln R' - ln P')``, R_i = exp(r_i - LSE(r)), R' = 1 - sum_i R_i, P alike. Merging
    outcomes never increases KL, so this is a lower bound of the KL over the vocabulary, and equal to it where T = V.

    Args:
        program: float [N, V].
        reference: Recorded along the same tokens.
    """
    program = program.double()
    difference = (program.gather(-1, reference.top_ids) - reference.top_logits.double()).abs()
    r = reference.top_logits.double() - reference.log_sum_exp.double().unsqueeze(-1)
    p = program.log_softmax(-1).gather(-1, reference.top_ids)
    kl = (r.exp() * (r - p)).sum(-1)
    if reference.top_ids.shape[-1] < program.shape[-1]:
        kl = kl + _rest_kl(r, program, reference.top_ids)
    return StepFigures(difference.amax(-1), difference.mean(-1), kl.clamp(min=0))  # rounding may leave -1e-17


def _rest_kl(r: torch.Tensor, program: torch.Tensor, top_ids: torch.Tensor) -> torch.Tensor:
    """R' (ln R' - ln P'). R' is what the recorded probabilities leave of 1; P' is summed over the other logits."""
    rest = (-torch.expm1(r.logsumexp(-1))).clamp(min=0)
    others = program.scatter(-1, top_ids, float("-inf")).logsumexp(-1) - program.logsumexp(-1)
    return torch.where(rest > 0, rest * (rest.log() - others), torch.zeros_like(rest))


def full_figures(program: torch.Tensor, reference: torch.Tensor) -> StepFigures:
    """Compare over the whole vocabulary; KL is exact: ``sum_v R_v (ln R_v - ln P_v)``. Both are float [N, V]."""
    program, reference = program.double(), reference.double()
    difference = (program - reference).abs()
    r, p = reference.log_softmax(-1), program.log_softmax(-1)
    kl = (r.exp() * (r - p)).sum(-1)
    return StepFigures(difference.amax(-1), difference.mean(-1), kl.clamp(min=0))


@dataclass(frozen=True)
class Margin:
    """How much the reference prefers its own choice to the program's, in logits."""

    value: float
    lower_bound: bool  # the program's choice is not among the recorded logits: the true margin is at least ``value``


def margin(reference: Reference, step: int, choice: int) -> Margin:
    """The reference's logit of its own choice at a step, less its logit of ``choice``."""
    logits = reference.top_logits[step].double()
    position = (reference.top_ids[step] == choice).nonzero()
    if position.numel() == 0:
        return Margin(float(logits[0] - logits[-1]), lower_bound=True)
    return Margin(float(logits[0] - logits[position[0, 0]]), lower_bound=False)


def windows(ids: torch.Tensor, window: int) -> Iterator[torch.Tensor]:
    """Cut a text, int64 [n], into windows for perplexity; a last one of fewer than two tokens scores nothing."""
    return (part for part in ids.split(window) if part.shape[0] > 1)


def negative_log_likelihood(logits: torch.Tensor, targets: torch.Tensor) -> float:
    """Sum over N positions of -ln softmax(logits)[target], nats. Logits are float [N, V], targets int64 [N]."""
    # A window's logits are too large to be worth a float64 copy; their float32 losses are summed in float64.
    return float(torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none").double().sum())
