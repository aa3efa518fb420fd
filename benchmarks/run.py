"""A whole run: prepare the peers, start their workers, score and measure them in turn, put the figures together."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from benchmarks.errors import PeerError
from benchmarks.figures import Measured
from benchmarks.peer import Peer, Ready, Workspace
from benchmarks.records import Point
from benchmarks.schedule import Asked, Trials, Work, run_rounds
from benchmarks.wire import Options, Request, to_line
from benchmarks.worker import Worker

_LOAD_TIMEOUT = 600.0  # seconds; torch.compile compiles in the first call, not here
_CALL_TIMEOUT = 900.0


@dataclass(frozen=True)
class Plan:
    """What a run measures.

    Attributes:
        work: tokens and rounds.
        positions: where decoding is measured.
        text: ids of the text whose perplexity is measured, cut into windows; none: it is not measured.
    """

    work: Work
    positions: tuple[int, ...]
    text: tuple[tuple[int, ...], ...]

    def points(self, peer: Peer, max_length: int) -> list[Point]:
        """What a peer is measured at: what its cache holds of it."""
        places = self.positions if peer.positions is None else (*self.positions, *peer.positions)
        fits = [at for at in dict.fromkeys(places) if at + self.work.decode_tokens <= max_length]
        prompts = [Point(kind="prefill", position=self.work.prompt_tokens)]
        return [*prompts, *(Point(kind="decode", position=at) for at in fits)]


def run(
    peers: Sequence[Peer],
    plan: Plan,
    workspace: Workspace,
    bandwidth: Callable[[], float],
) -> Measured:
    """Measure the peers; those that fail are in the result's failures."""
    failures: dict[str, str] = {}
    ready = dict(_prepared(peers, workspace, failures))
    by_name = {peer.name: peer for peer in peers}
    with contextlib.ExitStack() as stack:
        workers: dict[str, Asked] = {}
        for name, each in ready.items():
            workspace.progress(f"loading {name}")
            with _noted(failures, name):
                workers[name] = worker = _start(name, each, workspace)
                stack.callback(worker.close)
        nats = _scored(workers, plan, failures, workspace.progress)
        able = {name: worker for name, worker in workers.items() if name not in failures}
        points = {name: plan.points(by_name[name], worker.facts.max_length) for name, worker in able.items()}
        trials = run_rounds(able, points, plan.work, bandwidth, workspace.progress)
        failures |= trials.failures
        peaks = _peaks(able, trials, failures)
        facts = {name: worker.facts for name, worker in able.items()}
    return Measured(plan.work, ready, facts, points, trials, nats, peaks, failures)


def _prepared(peers: Sequence[Peer], workspace: Workspace, failures: dict[str, str]) -> Iterator[tuple[str, Ready]]:
    for peer in peers:
        workspace.progress(f"preparing {peer.name}")
        with _noted(failures, peer.name):
            yield peer.name, peer.prepare(workspace)


def _start(name: str, ready: Ready, workspace: Workspace) -> Worker:
    options = Options(ready.model, workspace.threads, workspace.max_length, ready.variant)
    threads = str(workspace.threads)
    variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
    log = workspace.log("run-" + name.replace("/", "_").replace(" ", "_"))
    return Worker((*ready.command, to_line(options)), variables, log, _LOAD_TIMEOUT, _CALL_TIMEOUT)


def _scored(
    workers: Mapping[str, Asked], plan: Plan, failures: dict[str, str], progress: Callable[[str], None]
) -> dict[str, float]:
    """Perplexity of each worker on the same windows."""
    scores = {}
    predicted = sum(len(window) - 1 for window in plan.text)
    for name, worker in workers.items() if predicted else ():
        progress(f"perplexity of {name}")
        with _noted(failures, name):
            nats = sum(worker.ask(Request("score", window)).nats for window in plan.text)
            scores[name] = math.exp(nats / predicted)
    return scores


def _peaks(workers: Mapping[str, Asked], trials: Trials, failures: dict[str, str]) -> dict[str, int]:
    peaks = {}
    for name in (name for name in workers if name not in trials.failures):
        with _noted(failures, name):
            peaks[name] = workers[name].ask(Request("peak")).peak_bytes
    return peaks


@contextlib.contextmanager
def _noted(failures: dict[str, str], name: str) -> Iterator[None]:
    """A failure inside becomes an entry; the run goes on."""
    try:
        yield
    except PeerError as error:
        failures[name] = str(error)


def windows_of(ids: Sequence[int], tokens: int, window: int) -> tuple[tuple[int, ...], ...]:
    """The first ``tokens`` ids of a text, cut; windows of one token predict nothing and are left out."""
    cut = (tuple(ids[start : min(start + window, tokens)]) for start in range(0, min(tokens, len(ids)), window))
    return tuple(each for each in cut if len(each) > 1)


def longest(plan_positions: Sequence[int], peers: Sequence[Peer], work_tokens: int) -> int:
    """Ids that the longest request takes."""
    own = chain.from_iterable(peer.positions or () for peer in peers)
    return max([*plan_positions, *own]) + work_tokens
