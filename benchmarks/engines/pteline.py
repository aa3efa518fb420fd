"""This project: a package in a session of its runners."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from benchmarks.engines.serve import serve, versions_of
from benchmarks.wire import Facts, Options
from runners.package import open_package
from runners.sampling import greedy
from runners.session import Session
from runners.threads import use_threads


class Pteline:
    """A session of a package."""

    def __init__(self, options: Options) -> None:
        self._threads = use_threads(options.threads)
        self._session = Session.open(open_package(Path(options.model)), options.threads)
        self._logits = torch.zeros(0)

    @property
    def position(self) -> int:
        """By the session's count: the program keeps none."""
        return self._session.position

    def facts(self) -> Facts:
        """The session's own numbers."""
        return Facts(self._threads, self._session.max_length, versions_of("executorch", "torch"))

    def reset(self) -> None:
        """Start a new sequence."""
        self._session.reset()

    def feed(self, ids: list[int]) -> int:
        """``decode`` for one token where the program has it, else ``forward``."""
        row = self._session.step(ids[0]) if len(ids) == 1 else self._session.prefill(ids)
        assert isinstance(row, torch.Tensor), "a package that is compared gives all logits"
        self._logits = row
        return greedy(row)

    def logits(self) -> np.ndarray:
        """The program's own output."""
        values: np.ndarray = self._logits.numpy()
        return values


if __name__ == "__main__":
    serve(Pteline)
