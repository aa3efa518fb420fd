"""One vector a text from an encoder's hidden states. B batch, S tokens, D width."""

from __future__ import annotations

import torch

from runners.errors import UserError
from runners.preprocessing import Pooling


def pool(hidden: torch.Tensor, mask: torch.Tensor, settings: Pooling) -> torch.Tensor:
    """Pool hidden states over the tokens that are there.

    Args:
        hidden: float ``[B, S, D]``, the encoder's last hidden states.
        mask: int64 or bool ``[B, S]``: 1 where a token is, 0 where there is padding, on either side.
        settings: ``mean`` averages the tokens, ``max`` takes the largest value of each of the D places, ``cls`` the
            first token. ``normalize`` then divides by the Euclidean length.

    Returns:
        float ``[B, D]``, of the dtype of ``hidden``.

    Raises:
        UserError: a text has no tokens, or the shapes do not belong together.
    """
    if hidden.ndim != 3 or mask.shape != hidden.shape[:2]:
        raise UserError(
            f"pooling takes hidden states [B, S, D] and a mask [B, S], got {list(hidden.shape)} and "
            f"{list(mask.shape)}; give the encoder's last hidden states and the mask of the same tokens."
        )
    present = mask.bool()
    if not present.any(dim=1).all():
        raise UserError("a text has no tokens, so it has no embedding; give a text that is not empty.")
    pooled = POOLINGS[settings.mode](hidden, present)
    return torch.nn.functional.normalize(pooled, dim=1) if settings.normalize else pooled


def _mean(hidden: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    # masked, not multiplied: a NaN in the padding would outlive a product with 0
    kept = hidden.masked_fill(~present.unsqueeze(-1), 0.0)
    return kept.sum(dim=1) / present.sum(dim=1, keepdim=True)


def _max(hidden: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    return hidden.masked_fill(~present.unsqueeze(-1), float("-inf")).amax(dim=1)


def _cls(hidden: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    first = present.int().argmax(dim=1)  # of equal values the first
    return hidden[torch.arange(len(hidden)), first]


POOLINGS = {"mean": _mean, "cls": _cls, "max": _max}
