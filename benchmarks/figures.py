"""From seconds to figures: speeds, shares, ratios with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.peer import Ready
from benchmarks.records import Comparison, Failure, PeerFigures, Point, Speed
from benchmarks.schedule import Trials, Work
from benchmarks.wire import Facts
from runners.bench_report import ratio, spread


@dataclass(frozen=True)
class Measured:
    """All that a run found, by the peers' names."""

    work: Work
    ready: Mapping[str, Ready]
    facts: Mapping[str, Facts]
    points: Mapping[str, Sequence[Point]]
    trials: Trials
    perplexity: Mapping[str, float]
    peaks: Mapping[str, int]
    failures: Mapping[str, str]


def peers_of(measured: Measured) -> list[PeerFigures]:
    """Every peer that took part to the end."""
    bandwidth = spread(measured.trials.bandwidth).median if measured.trials.bandwidth else None
    able = [name for name in measured.facts if name not in measured.failures]
    return [_peer(name, measured, bandwidth) for name in able]


def failures_of(measured: Measured) -> list[Failure]:
    """Every peer that did not."""
    return [Failure(name=name, reason=reason) for name, reason in measured.failures.items()]


def comparisons_of(measured: Measured, subjects: Sequence[str]) -> list[Comparison]:
    """Each subject against each other peer at every point that both were measured at, in the same rounds."""
    able = [name for name in measured.facts if name not in measured.failures]
    return [
        _comparison(subject, other, point, measured)
        for subject in subjects
        if subject in able
        for other in able
        if other != subject
        for point in measured.points[subject]
        if point in measured.points[other]
    ]


def _comparison(subject: str, other: str, point: Point, measured: Measured) -> Comparison:
    ours, theirs = measured.trials.seconds[subject, point], measured.trials.seconds[other, point]
    ratios = [slow / fast for fast, slow in zip(ours, theirs, strict=True)]
    return Comparison(subject=subject, other=other, point=point, ratio=ratio(point.label, ratios))


def _peer(name: str, measured: Measured, bandwidth: float | None) -> PeerFigures:
    ready, facts, trials = measured.ready[name], measured.facts[name], measured.trials
    held = ready.weights.file_bytes + ready.cache_bytes * facts.max_length
    return PeerFigures(
        name=name,
        weights=ready.weights.described,
        step_bytes=ready.weights.step_bytes,
        cache_bytes=ready.cache_bytes,
        file_bytes=ready.weights.file_bytes,
        max_length=facts.max_length,
        threads=facts.threads,
        versions=facts.versions,
        perplexity=measured.perplexity.get(name),
        build=ready.build,
        load_seconds=facts.load_seconds,
        peak_bytes=measured.peaks[name],
        imports_bytes=facts.imports_bytes,
        memory_over_model=measured.peaks[name] / held,
        own_memory_over_model=(measured.peaks[name] - facts.imports_bytes) / held,
        idle_share=trials.others_cpu[name] / trials.own_cpu[name] if trials.own_cpu.get(name) else 0.0,
        speeds=[_speed(name, point, measured, bandwidth) for point in measured.points[name]],
    )


def _speed(name: str, point: Point, measured: Measured, bandwidth: float | None) -> Speed:
    seconds = measured.trials.seconds[name, point]
    share = None
    if point.kind == "decode" and bandwidth is not None:
        share = _step_bytes(measured.ready[name], point, measured.work) / spread(seconds).median / bandwidth
    return Speed(point=point, tokens_per_second=spread([1 / each for each in seconds]), bandwidth_share=share)


def _step_bytes(ready: Ready, point: Point, work: Work) -> float:
    """Bytes of weights and cache that a step reads, in the middle of the steps that were measured."""
    attended = point.position + (work.decode_tokens + 1) / 2
    return ready.weights.step_bytes + ready.cache_bytes * attended
