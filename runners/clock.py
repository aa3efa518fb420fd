"""Clocks of a program's calls, for those who measure: what a call takes, and how much of it the program itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import torch


class Parts(Protocol):
    """The parts of a method's call, as ``runners.program.Method`` has them."""

    def set_inputs(self, inputs: Sequence[torch.Tensor]) -> None:
        """Hand over the inputs."""

    def execute(self) -> None:
        """Run the method."""

    def get_outputs(self, clone_outputs: bool = True) -> list[torch.Tensor]:
        """The outputs."""


@dataclass
class Clock:
    """Adds up the seconds of the calls of all methods of a program."""

    executing: float = 0.0  # the program's kernels and backends
    binding: float = 0.0  # the runtime's Python binding: inputs handed over, outputs made tensors


class ClockedMethod:
    """A method whose calls a clock sees; otherwise the method itself."""

    def __init__(self, method: Parts, clock: Clock) -> None:
        self._method, self._clock = method, clock

    def call(self, inputs: Sequence[torch.Tensor], clone_outputs: bool = True) -> list[torch.Tensor]:
        """The three parts, as the method's own ``call`` does them."""
        self.set_inputs(inputs)
        self.execute()
        return self.get_outputs(clone_outputs)

    def set_inputs(self, inputs: Sequence[torch.Tensor]) -> None:
        """Hand over the inputs."""
        begin = perf_counter()
        self._method.set_inputs(inputs)
        self._clock.binding += perf_counter() - begin

    def execute(self) -> None:
        """Run the method."""
        begin = perf_counter()
        self._method.execute()
        self._clock.executing += perf_counter() - begin

    def get_outputs(self, clone_outputs: bool = True) -> list[torch.Tensor]:
        """The outputs."""
        begin = perf_counter()
        outputs = self._method.get_outputs(clone_outputs)
        self._clock.binding += perf_counter() - begin
        return outputs
