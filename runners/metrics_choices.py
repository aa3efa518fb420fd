"""How far a program that gives its N likeliest tokens alone lies from a reference: what can be known, in float64.

n steps, V vocabulary, T recorded logits of a step (``runners.goldens.TOP``). r is the reference, p the program.
"""

from __future__ import annotations

import torch

from runners.choices import Choices
from runners.errors import UserError
from runners.goldens import Reference
from runners.metrics import StepFigures


def choice_figures(choices: Choices, reference: Reference, full: torch.Tensor | None = None) -> StepFigures:
    """Compare the chosen tokens' logits, and those of the reference's likeliest tokens that were not chosen.

    What is not known is bounded, so that the largest difference and KL are at most what they would be over the whole
    vocabulary: a token that the program did not choose has a logit no larger than its smallest choice, one that the
    reference did not record none larger than its smallest record. So a program that leaves a likely token out shows.
    The mean difference is that of the chosen tokens alone, bounded likewise where r is not known: it may be larger
    than that of all tokens. KL is the least that any logits of the other tokens allow: over the chosen tokens of known
    r, both distributions made to sum to 1, times the share that r gives these tokens.

    Args:
        choices: The program's, [n, N].
        reference: Recorded along the same tokens.
        full: The reference's logits over the whole vocabulary, float [n, V], where they are at hand.

    Raises:
        UserError: the program chose a token beyond the reference's vocabulary.
    """
    p = choices.logits.double()
    r, is_known = _of_chosen(choices, reference, full)
    # Of an unknown r only this much is certain: it is not larger than the smallest record.
    difference = torch.where(is_known, (p - r).abs(), (p - r).clamp(min=0))
    largest = torch.maximum(difference.amax(-1), _left_out(choices, reference, full))
    return StepFigures(largest, difference.mean(-1), _least_kl(p, r, is_known, _log_sum_exp(reference, full)))


def _of_chosen(choices: Choices, reference: Reference, full: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's logits of the chosen tokens, float64 [n, N], and where they are known; elsewhere, its smallest
    record."""
    if full is not None:
        if int(choices.ids.max()) >= full.shape[-1]:
            raise UserError(f"the program chose token {int(choices.ids.max())}, the reference has {full.shape[-1]}")
        return full.double().gather(-1, choices.ids), torch.ones_like(choices.ids, dtype=torch.bool)
    same = choices.ids.unsqueeze(-1) == reference.top_ids.unsqueeze(-2)  # [n, N, T]
    is_known = same.any(-1)
    logits = reference.top_logits.double()
    found = logits.gather(-1, same.int().argmax(-1))
    return torch.where(is_known, found, logits[:, -1:]), is_known


def _left_out(choices: Choices, reference: Reference, full: torch.Tensor | None) -> torch.Tensor:
    """By how much the reference's logit of a token that was not chosen passes the program's smallest choice at least,
    float64 [n]; 0 where none does. Of its N likeliest tokens, or as many as are recorded."""
    if full is not None:
        logits, ids = full.double().topk(choices.ids.shape[-1])
    else:
        logits, ids = reference.top_logits.double(), reference.top_ids
    chosen = (ids.unsqueeze(-1) == choices.ids.unsqueeze(-2)).any(-1)
    excess = (logits - choices.logits.double().amin(-1, keepdim=True)).clamp(min=0)
    return torch.where(chosen, 0.0, excess).amax(-1)


def _log_sum_exp(reference: Reference, full: torch.Tensor | None) -> torch.Tensor:
    return full.double().logsumexp(-1) if full is not None else reference.log_sum_exp.double()


def _least_kl(p: torch.Tensor, r: torch.Tensor, is_known: torch.Tensor, log_sum_exp: torch.Tensor) -> torch.Tensor:
    """m · sum_i R_i (ln R_i - ln P_i) over the known tokens, R and P made to sum to 1 there, m what R summed to."""
    nothing = float("-inf")
    r, p = r.masked_fill(~is_known, nothing), p.masked_fill(~is_known, nothing)
    share = (r.logsumexp(-1) - log_sum_exp).exp().clamp(max=1)
    ratio = torch.where(is_known, r.log_softmax(-1) - p.log_softmax(-1), 0.0)
    return torch.nan_to_num(share * (r.softmax(-1) * ratio).sum(-1), nan=0.0).clamp(min=0)
