"""A piece of a program that a backend takes whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from executorch.exir.lowered_backend_module import LoweredBackendModule
from torch.export import ExportedProgram


@dataclass(frozen=True)
class Part:
    """One delegate of one output."""

    module: LoweredBackendModule
    inputs: tuple[str, ...]  # names of the program's inputs, in the order in which the delegate takes them


LowerPart: TypeAlias = Callable[[ExportedProgram], Part | None]  # None: the backend does not take it whole
