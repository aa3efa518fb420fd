"""What the benchmarks compare: a peer prepares itself once, then works in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.records import BuildCost
from benchmarks.weights import Weights


@dataclass(frozen=True)
class Source:
    """The one model that every peer is made of."""

    gguf: Path  # as downloaded
    folder: Path  # the same weights in float32 with config and tokenizer, as transformers writes them


@dataclass(frozen=True)
class Workspace:
    """Where and of what peers are made.

    Attributes:
        root: directory of environments, models and logs.
        source: makes the source on first use; PeerError where it cannot.
        threads: that every peer is run with.
        max_length: positions that every peer's cache must hold.
        slow: whether peers whose model takes many minutes may make it now.
        progress: told what is being done.
    """

    root: Path
    source: Callable[[], Source]
    threads: int
    max_length: int
    slow: bool
    progress: Callable[[str], None]

    def model(self, name: str) -> Path:
        """The directory of a model made for a peer."""
        return self.root / "models" / name

    def log(self, name: str) -> Path:
        """The file for what a process says."""
        return self.root / "logs" / f"{name}.log"


@dataclass(frozen=True)
class Ready:
    """A prepared peer: how its worker is started, and what its model is."""

    command: tuple[str, ...]  # to which the options are added
    model: str  # the file or folder that the engine loads
    weights: Weights
    cache_bytes: int  # that one position takes; a step reads those of every position attended
    build: BuildCost | None  # None: it is loaded as it is
    variant: str = ""  # for an engine that serves several peers


class Peer(Protocol):
    """One row of the comparison. ``Facts`` of its worker say its versions."""

    @property
    def name(self) -> str:
        """As in tables."""
        ...

    @property
    def positions(self) -> tuple[int, ...] | None:
        """The decode positions that it is measured at; None: those of the run."""
        ...

    def prepare(self, workspace: Workspace) -> Ready:
        """Install and make what is missing.

        Raises:
            PeerError: it cannot be installed or made.
        """
        ...
