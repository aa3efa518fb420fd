"""Clocks of a program's calls, for those who measure: what a call takes, and how much of it the program itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import torch


class Stages(Protocol):
    """A method of a loaded program whose call can be made in its three parts."""

    def set_inputs(self, inputs: Sequence[torch.Tensor]) -> None:
        """Check the inputs and hand them to the method."""

    def execute(self) -> None:
        """Run the method."""

    def get_outputs(self, clone_outputs: bool = True) -> list[torch.Tensor]:
        """The outputs as tensors of PyTorch."""


@dataclass
class Clock:
    """Adds up the seconds of the calls of all methods of a program."""

    executing: float = 0.0  # the program's kernels and backends
    binding: float = 0.0  # the runtime's Python binding: inputs handed over, outputs made tensors


class ClockedMethod:
    """A method whose calls a clock sees; otherwise the method itself."""

    def __init__(self, method: Stages, clock: Clock) -> None:
        self._method, self._clock = method, clock

    def call(self, inputs: Sequence[torch.Tensor], clone_outputs: bool = True) -> list[torch.Tensor]:
        """Run the method: what its own ``call`` does, in the same three parts."""
        begin = perf_counter()
        self._method.set_inputs(inputs)
        ready = perf_counter()
        self._method.execute()
        done = perf_counter()
        outputs = self._method.get_outputs(clone_outputs)
        self._clock.executing += done - ready
        self._clock.binding += perf_counter() - done + ready - begin
        return outputs
