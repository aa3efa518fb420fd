"""What ``pteline inspect`` found, as its JSON has it."""

from __future__ import annotations

from dataclasses import dataclass

from runners.check_report import CheckReport
from runners.manifest import Manifest
from runners.pte import ProgramDescription
from runners.stock_contract import Verdict


@dataclass(frozen=True)
class CacheKind:
    """All cache tensors of one kind."""

    kind: str  # "full", "sliding", …
    tensors: int
    bytes: int
    shapes: tuple[str, ...]  # distinct ones: "float32 [1, 2048, 3, 64]"


@dataclass(frozen=True)
class Inspection:
    """A program, and what its package adds. A bare ``.pte`` file has neither manifest, cache nor check."""

    path: str
    program: ProgramDescription
    stock_runner: Verdict
    manifest: Manifest | None = None
    cache: tuple[CacheKind, ...] = ()
    check: CheckReport | None = None
