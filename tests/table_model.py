"""A toy model with a memory, and what is measured along it. V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runners.check import FullLogits, LogitSource, repeats
from runners.check import check as check_repeatable
from runners.check_report import (
    CheckReport,
    Limits,
)
from runners.goldens import Goldens
from runners.metrics import windows

VOCABULARY, STEPS = 200, 5


class TableModel:
    """A toy with a memory: its logits are a row of a table chosen by all tokens fed since the last reset."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self.fed: list[int] = []
        self.output = torch.empty(VOCABULARY)  # one buffer, overwritten by each call, as a program's output is

    def reset(self) -> None:
        self.fed = []

    def prefill(self, ids: Sequence[int]) -> torch.Tensor:
        self.fed += ids
        return self.output.copy_(self.table[self.row()])

    def step(self, token: int) -> torch.Tensor:
        return self.prefill([token])

    def row(self) -> int:
        return sum((i + 1) * token for i, token in enumerate(self.fed)) % self.table.shape[0]


class StaleModel(TableModel):
    """Forgets to forget."""

    def reset(self) -> None:
        self.fed = self.fed[:1]


def check(source: LogitSource, goldens: Goldens, *rest: Limits | FullLogits) -> CheckReport:
    return check_repeatable(source, goldens, *rest, repeatable=repeats(source, goldens))


def table(seed: int) -> torch.Tensor:
    return torch.randn(97, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def along(model: TableModel, ids: list[int], forced: list[int] | None = None) -> torch.Tensor:
    model.reset()
    rows = [model.prefill(ids).clone()]
    for step in range(STEPS - 1):
        rows.append(model.step(forced[step] if forced else int(rows[-1].argmax())).clone())
    return torch.stack(rows)


def nll(model: TableModel, ids: torch.Tensor, window: int) -> float:
    losses = []
    for part in windows(ids, window):
        model.reset()
        for token, target in zip(part[:-1].tolist(), part[1:].tolist(), strict=True):
            losses.append(-float(model.step(token).log_softmax(-1)[target]))
    return sum(losses) / len(losses)
