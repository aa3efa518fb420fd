"""What a call of a program says of the next token: the logits of all tokens, or those of the likeliest ones alone.

V vocabulary, N tokens that the program chooses (``export.top_k``), n rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from runners.manifest import Method

TOP_LOGITS, TOP_IDS = "top_logits", "top_ids"  # names of the outputs


@dataclass(frozen=True)
class Choices:
    """The N likeliest tokens, the likeliest first, of one row or of several."""

    logits: torch.Tensor  # float32 [N] or [n, N]: as the program would have given them among those of all tokens
    ids: torch.Tensor  # int64, of the same shape

    def __getitem__(self, row: int) -> Choices:
        """One row of several."""
        return Choices(self.logits[row], self.ids[row])


Row: TypeAlias = torch.Tensor | Choices
"""Float32 [V], or the N likeliest; of several rows [n, V], or n times the N likeliest."""


def chosen_tokens(method: Method) -> int | None:
    """N of a method; None: it gives the logits of all tokens."""
    return method.outputs[0].shape[-1] if method.outputs[0].name == TOP_LOGITS else None


def likeliest(row: Row) -> tuple[int, float]:
    """The likeliest token of one row, and its logit: the lowest id of equals, or that which the program chose.

    NaN is taken for the largest.
    """
    # NumPy's views and its argmax, which takes no threads: for so little work, waiting for them takes longer.
    if isinstance(row, Choices):
        return int(row.ids.numpy()[0]), float(row.logits.numpy()[0])
    values = row.numpy()
    token = int(values.argmax())
    return token, float(values[token])


def kept(row: Row) -> Row:
    """A copy, which later calls of the program do not overwrite."""
    return Choices(row.logits.clone(), row.ids.clone()) if isinstance(row, Choices) else row.float().clone()


def joined(rows: Sequence[Row]) -> Row:
    """What several calls of one program gave, single rows or several each, as several rows."""
    chosen = [row for row in rows if isinstance(row, Choices)]
    if chosen:
        return Choices(_joined([row.logits for row in chosen]), _joined([row.ids for row in chosen]))
    return _joined([row for row in rows if isinstance(row, torch.Tensor)])


def _joined(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([row.reshape(-1, row.shape[-1]) for row in rows])
