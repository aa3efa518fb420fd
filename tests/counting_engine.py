"""An engine for the benchmarks' tests, in a file of its own: the worker processes that run it shall start quickly."""

from __future__ import annotations

import numpy as np

from benchmarks.engines.serve import serve
from benchmarks.wire import Facts, Options

VOCABULARY = 11


class CountingEngine:
    """An engine whose choice is the last token plus one, and whose logits are those of a fair coin over two tokens."""

    def __init__(self, options: Options) -> None:
        if options.variant == "broken":
            raise ValueError("first line\nno such kernel")
        self.options = options
        self.fed: list[int] = []
        self.calls: list[int] = []

    @property
    def position(self) -> int:
        return len(self.fed) - (self.options.variant == "forgetful")

    def facts(self) -> Facts:
        return Facts(self.options.threads, self.options.max_length, {"fake": "1"})

    def reset(self) -> None:
        self.fed = []

    def feed(self, ids: list[int]) -> int:
        if self.options.variant == "dying" and len(self.fed) >= 6:
            raise RuntimeError("the device was lost")
        self.fed += ids
        self.calls.append(len(ids))
        return ids[-1] + 1

    def logits(self) -> np.ndarray:
        values = np.full(VOCABULARY, -1e9, np.float32)
        values[[(self.fed[-1] + 1) % VOCABULARY, 0]] = 5.0
        return values


if __name__ == "__main__":
    serve(CountingEngine)
