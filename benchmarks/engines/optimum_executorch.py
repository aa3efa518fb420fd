"""A program of optimum-executorch, run as its own class for causal language models runs it."""

from __future__ import annotations

from pathlib import Path

import executorch.kernels.quantized  # noqa: F401  the quantized embedding's kernel
import numpy as np
import torch
from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401  custom SDPA and cache
from executorch.extension.pybindings import portable_lib

from benchmarks.engines.serve import serve, versions_of
from benchmarks.wire import Facts, Options


class OptimumExecutorch:
    """``forward(input_ids, cache_position)`` of a ``model.pte``; logits of every token come out."""

    def __init__(self, options: Options) -> None:
        torch.set_num_threads(1)  # only argmax is torch's: its pool would spin beside the runtime's
        portable_lib._unsafe_reset_threadpool(options.threads)
        self._options = options
        self._program = portable_lib._load_for_executorch(str(Path(options.model) / "model.pte"))
        self._position = 0
        self._logits = torch.zeros(0)

    @property
    def position(self) -> int:
        """By this class: the program keeps no count."""
        return self._position

    def facts(self) -> Facts:
        """The pool's own number of threads."""
        return Facts(
            int(portable_lib._threadpool_get_thread_count()),
            self._options.max_length,
            versions_of("optimum-executorch", "executorch", "transformers"),
        )

    def reset(self) -> None:
        """What an earlier sequence left is never attended to."""
        self._position = 0

    def feed(self, ids: list[int]) -> int:
        """One call of ``forward``."""
        end = self._position + len(ids)
        places = torch.arange(self._position, end, dtype=torch.int64)
        logits = self._program.forward((torch.tensor([ids], dtype=torch.int64), places))[0]
        self._position = end
        self._logits = logits[0, -1]
        return int(self._logits.argmax())

    def logits(self) -> np.ndarray:
        """The program's own output."""
        values: np.ndarray = self._logits.numpy()
        return values


if __name__ == "__main__":
    serve(OptimumExecutorch)
