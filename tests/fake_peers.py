"""Peers that are not there: a worker with scripted times, and the report of a run of some."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.commands import python
from benchmarks.errors import PeerError
from benchmarks.figures import Measured, comparisons_of, failures_of, peers_of
from benchmarks.peer import Ready, Source, Workspace
from benchmarks.records import Point, Report
from benchmarks.schedule import Trials, Work, run_rounds
from benchmarks.weights import Weights
from benchmarks.wire import Answer, Facts, Request
from runners.bench_report import spread
from runners.machine import describe

PREFILL = Point(kind="prefill", position=4)
DECODE = Point(kind="decode", position=6)
WORK = Work(prompt_tokens=4, decode_tokens=3, rounds=6, warmup=1, ids=tuple(range(1, 30)))


@dataclass
class FakeWorker:
    """Answers with scripted seconds a token, and takes processor time only while it is asked."""

    name: str
    seconds: float
    journal: list[tuple[str, str]]
    fails_at: int | None = None
    lost: int = 0
    busy: float = 0.0
    asked: int = 0
    closed: bool = False
    facts: Facts = field(default_factory=lambda: Facts(2, 64, {"fake": "1"}))

    def ask(self, request: Request) -> Answer:
        self.asked += 1
        if self.fails_at == self.asked:
            raise PeerError("out of luck")
        self.journal.append((self.name, request.order))
        self.busy += 1.0
        calls = 1 if request.order == "prefill" else len(request.ids)
        each = self.seconds * (len(request.ids) if request.order == "prefill" else 1)
        position = len(request.context) + len(request.ids) - self.lost
        return Answer(seconds=(each,) * calls, tokens=(1,) * calls, position=position)

    def cpu_seconds(self) -> float:
        return self.busy

    def close(self) -> None:
        self.closed = True


@dataclass(frozen=True)
class FakePeer:
    """A peer whose worker is this file."""

    name: str
    variant: str = ""
    positions: tuple[int, ...] | None = None
    max_length: int = 64

    def prepare(self, workspace: Workspace) -> Ready:
        if self.variant == "absent":
            raise PeerError("No matching distribution found for absent")
        command = python("tests.counting_engine")
        return Ready(command, "model", Weights("4 bits", 1000, 1200), 10, None, self.variant)


def workspace(root: Path) -> Workspace:
    return Workspace(root, lambda: Source(root, root), 1, 64, False, lambda what: None)


def fake_run(workers: dict[str, FakeWorker], work: Work = WORK) -> Trials:
    points = {name: [PREFILL, DECODE] for name in workers}
    return run_rounds(workers, points, work, lambda: 1e9, lambda what: None)


def measured_of(workers: dict[str, FakeWorker], trials: Trials) -> Measured:
    ready = {name: Ready((), "model", Weights("4 bits", 1000, 1200), 10, None) for name in workers}
    facts = {name: worker.facts for name, worker in workers.items()}
    points = {name: [PREFILL, DECODE] for name in workers}
    peaks = dict.fromkeys(workers, 4000)
    return Measured(WORK, ready, facts, points, trials, {name: 12.5 for name in workers}, peaks, trials.failures)


def report_of(measured: Measured, subjects: list[str]) -> Report:
    return Report(
        machine=describe(),
        when="2026-01-01T00:00+00:00",
        command="python -m benchmarks",
        threads=2,
        rounds=WORK.rounds,
        warmup=WORK.warmup,
        decode_tokens=WORK.decode_tokens,
        perplexity_tokens=8,
        perplexity_window=4,
        bandwidth=spread(measured.trials.bandwidth),
        peers=peers_of(measured),
        failures=failures_of(measured),
        comparisons=comparisons_of(measured, subjects),
    )
