"""What a run of the benchmarks records: the classes of its JSON."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from runners.bench_report import Ratio, Spread
from runners.machine import Machine


class Record(BaseModel):
    """Base of every entry: immutable, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class BuildCost(Record):
    """What making a peer's model cost."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    note: str = ""  # "2 of 10 stages came from the cache"


class Point(Record):
    """One thing that is measured: a prompt of ``position`` tokens, or decoding that begins at ``position``."""

    kind: Literal["prefill", "decode"]
    position: int

    @property
    def label(self) -> str:
        """Its name in tables."""
        return f"prefill {self.position}" if self.kind == "prefill" else f"decode at {self.position}"


class Speed(Record):
    """One peer at one point."""

    point: Point
    tokens_per_second: Spread  # a round
    bandwidth_share: float | None  # decode: bytes of weights and cache read a second over the memory's bandwidth


class PeerFigures(Record):
    """One peer that took part."""

    name: str
    weights: str
    step_bytes: int  # bytes of weights that a decode step reads
    cache_bytes: int  # a position
    file_bytes: int
    max_length: int
    threads: int
    versions: dict[str, str]
    perplexity: float | None
    build: BuildCost | None  # None: it is loaded as it is
    load_seconds: float
    peak_bytes: int
    imports_bytes: int  # of the peak, before the model was loaded
    memory_over_model: float  # peak over file and whole cache
    own_memory_over_model: float  # the same without what the imports took
    idle_share: float  # processor seconds that the other workers took while this one was measured, over its own
    speeds: list[Speed]


class Failure(Record):
    """One peer that did not."""

    name: str
    reason: str


class Comparison(Record):
    """How many times as fast a subject is as another peer at one point, round by round."""

    subject: str
    other: str
    point: Point
    ratio: Ratio


class Report(Record):
    """A whole run."""

    machine: Machine
    when: str  # UTC, ISO 8601
    command: str
    threads: int
    rounds: int
    warmup: int
    decode_tokens: int
    perplexity_tokens: int
    perplexity_window: int
    bandwidth: Spread | None  # bytes a second, measured in each round
    peers: list[PeerFigures]
    failures: list[Failure]
    comparisons: list[Comparison]
