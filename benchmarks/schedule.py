"""Who is measured when: round after round, every point by every worker in turn, one at a time.

The order of the workers changes from round to round, so that no worker always follows the same other one, and a slow
moment of the machine strikes all. A worker that fails is left out from then on; the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.errors import PeerError
from benchmarks.records import Point
from benchmarks.wire import Answer, Facts, Request


class Asked(Protocol):
    """What the scheduler needs of a worker."""

    @property
    def facts(self) -> Facts:
        """What the worker said of itself."""
        ...

    def ask(self, request: Request) -> Answer:
        """Do a request. Raises PeerError."""
        ...

    def cpu_seconds(self) -> float:
        """Processor seconds taken so far."""
        ...

    def close(self) -> None:
        """End it."""
        ...


@dataclass(frozen=True)
class Work:
    """How much is measured."""

    prompt_tokens: int
    decode_tokens: int
    rounds: int
    warmup: int
    ids: tuple[int, ...]  # the ids that are fed, at least as many as the last position and its tokens


@dataclass
class Trials:
    """What the rounds gave. A list has one entry a round, so that equal places were measured together."""

    seconds: dict[tuple[str, Point], list[float]] = field(default_factory=dict)  # a token
    bandwidth: list[float] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    own_cpu: dict[str, float] = field(default_factory=dict)
    others_cpu: dict[str, float] = field(default_factory=dict)


def order(names: Sequence[str], number: int) -> list[str]:
    """The order of a round: it begins one place further each time, and every second round is reversed."""
    turn = number // 2 % max(1, len(names))
    turned = [*names[turn:], *names[:turn]]
    return turned[::-1] if number % 2 else turned


def request_of(point: Point, work: Work) -> Request:
    """What every worker is asked at a point: the same ids for all."""
    if point.kind == "prefill":
        return Request("prefill", work.ids[: point.position])
    end = point.position + work.decode_tokens
    return Request("decode", work.ids[point.position : end], work.ids[: point.position])


def require_equal_work(request: Request, answer: Answer) -> None:
    """Every token went in, by the engine's own count, and as many choices came out as were asked for.

    Raises:
        PeerError: they did not.
    """
    fed = len(request.context) + len(request.ids)
    calls = 1 if request.order == "prefill" else len(request.ids)
    if answer.position != fed:
        raise PeerError(f"{fed} tokens were given, {answer.position} are in its cache: not the same work")
    if len(answer.tokens) != calls or len(answer.seconds) != calls:
        raise PeerError(f"{calls} choices were asked for, {len(answer.tokens)} came: not the same work")


def run_rounds(
    workers: Mapping[str, Asked],
    points: Mapping[str, Sequence[Point]],
    work: Work,
    bandwidth: Callable[[], float] | None,
    progress: Callable[[str], None],
) -> Trials:
    """Measure.

    Args:
        workers: by name; each is idle but while it is asked.
        points: what each worker is measured at; points that several have in common are measured one after the other.
        work: how much.
        bandwidth: measures the memory's bandwidth, bytes a second; once a round.
        progress: told what is being measured.
    """
    trials = Trials()
    every = list(dict.fromkeys(point for name in workers for point in points[name]))
    for number in range(work.warmup + work.rounds):
        warm = number - work.warmup + 1
        if bandwidth is not None and warm > 0:
            trials.bandwidth.append(bandwidth())
        for point in every:
            progress(f"{f'round {warm} of {work.rounds}' if warm > 0 else 'warm-up'}, {point.label}")
            for name in order(list(workers), number):
                if name not in trials.failures and point in points[name]:
                    _measure(name, workers, point, work, trials, keep=warm > 0)
    return trials


def _measure(name: str, workers: Mapping[str, Asked], point: Point, work: Work, trials: Trials, *, keep: bool) -> None:
    """One worker at one point; its failure is noted."""
    others = [worker for other, worker in workers.items() if other != name and other not in trials.failures]
    request = request_of(point, work)
    before, before_others = workers[name].cpu_seconds(), _total(others)
    try:
        answer = workers[name].ask(request)
        require_equal_work(request, answer)
    except PeerError as error:
        trials.failures[name] = f"{point.label}: {error}"
        workers[name].close()
        return
    if keep:
        tokens = len(request.ids)
        trials.seconds.setdefault((name, point), []).append(sum(answer.seconds) / tokens)
        trials.own_cpu[name] = trials.own_cpu.get(name, 0.0) + workers[name].cpu_seconds() - before
        trials.others_cpu[name] = trials.others_cpu.get(name, 0.0) + _total(others) - before_others


def _total(workers: Sequence[Asked]) -> float:
    return sum(worker.cpu_seconds() for worker in workers)
