"""Measure one package, or two against each other, on this machine.

A trial starts with an empty cache: it prefills the prompt and chooses the first token (time to first token), then feeds
token after token (decode), choosing greedily after each so that a step costs what it costs a user. The ids that are fed
are fixed, ``1 + 7919 * i mod (V - 1)`` for the i-th, so that every trial and every package does the same work. Trials
of two packages alternate, A B B A A B …, so that a slow moment of the machine strikes both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import perf_counter

from runners.bench_report import BenchReport, Memory, PackageFigures, Ratio, ratio, spread
from runners.clock import Clock
from runners.errors import UserError
from runners.machine import Machine
from runners.multimodal import open_text_session
from runners.package import Package
from runners.sampling import greedy
from runners.session import Session
from runners.threads import use_threads

MAX_LOADS = 5  # loading packs every weight anew: a few times show its spread
MEMORY_MARK = "pteline-memory "  # begins the line that the memory probe prints


@dataclass(frozen=True)
class Workload:
    """What a trial does.

    Raises:
        UserError: a count lies outside its range.
    """

    prompt_tokens: int = 128
    new_tokens: int = 64
    trials: int = 10
    warmup: int = 2
    at: int | None = None  # cache position at which decoding is measured; None: right after the prompt

    def __post_init__(self) -> None:
        for name, least in {"prompt_tokens": 1, "new_tokens": 1, "trials": 1, "warmup": 0}.items():
            if getattr(self, name) < least:
                option = name.replace("_", "-")
                raise UserError(f"--{option} is {getattr(self, name)}; expected {least} or more.")
        if self.at is not None and self.at < self.prompt_tokens:
            raise UserError(
                f"--at is {self.at}, which lies within the prompt of {self.prompt_tokens} tokens: "
                "give a later position, or fewer --prompt-tokens."
            )

    @property
    def start(self) -> int:
        """Cache position of the first decode step."""
        return self.prompt_tokens if self.at is None else self.at


@dataclass(frozen=True)
class Trial:
    """Seconds of one trial."""

    first_token: float  # prompt ids ready -> first token chosen
    steps: tuple[float, ...]  # each step: token fed -> next token chosen
    outside: tuple[float, ...]  # of each step: all but the program's own execution
    binding: tuple[float, ...]  # of that: the runtime's Python binding, which hands over inputs and outputs


def measure(
    packages: Sequence[Package],
    work: Workload,
    threads: int | None,
    machine: Machine,
    progress: Callable[[str], None],
) -> BenchReport:
    """Measure one package, or a package and the one it is compared with.

    Raises:
        UserError: the workload does not fit into a package's context, or a package cannot be loaded.
    """
    for package in packages:
        _require_fit(package, work)
    count = use_threads(threads)
    progress("memory")
    memory = [probe_memory(package, work, count) for package in packages]
    loads = _load_times(packages, count, min(work.trials, MAX_LOADS), progress)
    clocks = [Clock() for _ in packages]
    sessions = [open_text_session(package, count, clock) for package, clock in zip(packages, clocks, strict=True)]
    trials = _alternate(list(zip(sessions, clocks, strict=True)), work, progress)
    figures = [_figures(*row, work) for row in zip(packages, memory, loads, trials, strict=True)]
    ratios = _ratios(trials[0], trials[1], work) if len(packages) == 2 else []
    return BenchReport(
        machine=machine,
        threads=count,
        prompt_tokens=work.prompt_tokens,
        new_tokens=work.new_tokens,
        trials=work.trials,
        warmup=work.warmup,
        decode_position=work.start,
        packages=figures,
        ratios=ratios,
    )


def token_ids(count: int, vocabulary_size: int, start: int = 0) -> list[int]:
    """The ids that a trial feeds, from the ``start``-th on. They depend on the vocabulary's size alone."""
    return [1 + 7919 * index % (vocabulary_size - 1) for index in range(start, start + count)]


def run_trial(session: Session, clock: Clock, work: Workload) -> Trial:
    """One trial from an empty cache. The clock is that of the session's program."""
    session.reset()
    ids = token_ids(work.start + work.new_tokens, session.vocabulary_size)
    begin = perf_counter()
    greedy(session.prefill(ids[: work.prompt_tokens]))
    first = perf_counter()
    if work.start > work.prompt_tokens:
        session.prefill(ids[work.prompt_tokens : work.start])
    marks = [(perf_counter(), clock.executing, clock.binding)]
    for token in ids[work.start :]:
        greedy(session.step(token))
        marks.append((perf_counter(), clock.executing, clock.binding))
    steps, executing, binding = (
        tuple(after - before for before, after in pairwise(column)) for column in zip(*marks, strict=True)
    )
    outside = tuple(whole - inside for whole, inside in zip(steps, executing, strict=True))
    return Trial(first - begin, steps, outside, binding)


def probe_memory(package: Package, work: Workload, threads: int) -> Memory:
    """Peak memory of one trial in a process of its own, so that nothing else is counted.

    Raises:
        UserError: the process failed; its message is passed on.
    """
    command = [sys.executable, "-m", "runners.memory_probe", str(package.path.resolve())]
    numbers = [work.prompt_tokens, work.new_tokens, work.start, threads]
    # The child must find this package also where it runs from a source folder.
    path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]).rstrip(
        os.pathsep
    )
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([*command, *map(str, numbers)], env=environment, capture_output=True, text=True, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith(MEMORY_MARK)), None)
    if done.returncode or line is None:
        reason = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise UserError(f"{package.path}: a run in a process of its own failed: {reason[0]}")
    return Memory.model_validate_json(line.removeprefix(MEMORY_MARK))


def _require_fit(package: Package, work: Workload) -> None:
    cache = package.manifest.cache
    needed = work.start + work.new_tokens
    if cache is not None and needed > cache.max_length:
        raise UserError(
            f"a trial takes {needed} tokens ({work.start} before decoding and {work.new_tokens} new), but the context "
            f"of '{package.manifest.name}' holds {cache.max_length}: lower --prompt-tokens, --new-tokens or --at."
        )


def order(trial: int, packages: int) -> list[int]:
    """Which package goes first in a trial: A B, then B A, and so on."""
    order = list(range(packages))
    return order if trial % 2 == 0 else order[::-1]


def _load_times(
    packages: Sequence[Package], threads: int, loads: int, progress: Callable[[str], None]
) -> list[list[float]]:
    """Seconds of loading, a list a package; the file is in the page cache after the first, which is not counted."""
    seconds: list[list[float]] = [[] for _ in packages]
    for load in range(loads + 1):
        progress(f"load {load} of {loads}")
        for index in order(load, len(packages)):
            begin = perf_counter()
            open_text_session(packages[index], threads)
            seconds[index].append(perf_counter() - begin)
    return [each[1:] for each in seconds]


def _alternate(
    sessions: Sequence[tuple[Session, Clock]], work: Workload, progress: Callable[[str], None]
) -> list[list[Trial]]:
    """The warm trials of each session, alternating."""
    trials: list[list[Trial]] = [[] for _ in sessions]
    for number in range(work.warmup + work.trials):
        warm = number - work.warmup + 1
        progress(f"trial {warm} of {work.trials}" if warm > 0 else "warm-up")
        for index in order(number, len(sessions)):
            trials[index].append(run_trial(*sessions[index], work))
    return [each[work.warmup :] for each in trials]


def _figures(
    package: Package, memory: Memory, loads: list[float], trials: list[Trial], work: Workload
) -> PackageFigures:
    return PackageFigures(
        name=package.manifest.name,
        path=str(package.path),
        program_sha256=package.manifest.files[package.program_path.name].sha256,
        memory=memory,
        load_seconds=spread(loads),
        first_token_seconds=spread([trial.first_token for trial in trials]),
        prefill_tokens_per_second=spread([work.prompt_tokens / trial.first_token for trial in trials]),
        decode_tokens_per_second=spread([_decode_speed(trial) for trial in trials]),
        step_seconds=spread([step for trial in trials for step in trial.steps]),
        outside_seconds=spread([seconds for trial in trials for seconds in trial.outside]),
        outside_share=spread(
            [part / step for trial in trials for part, step in zip(trial.outside, trial.steps, strict=True)]
        ),
        binding_seconds=spread([seconds for trial in trials for seconds in trial.binding]),
    )


def _decode_speed(trial: Trial) -> float:
    return len(trial.steps) / sum(trial.steps)


def _ratios(first: list[Trial], second: list[Trial], work: Workload) -> list[Ratio]:
    """How many times as fast the first package is, from the trials paired by number."""
    pairs = list(zip(first, second, strict=True))
    return [
        ratio("prefill", [b.first_token / a.first_token for a, b in pairs]),
        ratio("decode", [_decode_speed(a) / _decode_speed(b) for a, b in pairs]),
    ]


def memory_line(memory: Memory) -> str:
    """The line by which the memory probe answers."""
    return MEMORY_MARK + json.dumps(memory.model_dump(mode="json"))
