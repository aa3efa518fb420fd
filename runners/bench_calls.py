"""Measure a program without a cache: the time of one call, of one package or of two against each other.

A text is of fixed ids, those of ``runners.bench.token_ids``; an image is of zeros, for a call costs the same whatever
its values are. Trials of two packages alternate, A B B A A B …, so that a slow moment of the machine strikes both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from runners.bench import order, token_ids
from runners.bench_report import Figures, Ratio, Spread, ratio, spread
from runners.caller import PIXELS, Caller, max_tokens, text_inputs
from runners.errors import UserError
from runners.machine import Machine
from runners.package import Package
from runners.threads import use_threads

LENGTHS = (8, 128)  # tokens of a text, where the caller names none
_VOCABULARY = 30_000  # ids are drawn below it where a manifest names no size


@dataclass(frozen=True)
class Calls:
    """What is measured.

    Raises:
        UserError: a count lies outside its range.
    """

    lengths: tuple[int, ...] | None = None  # tokens of a text; None: ``LENGTHS``, those that fit
    trials: int = 10
    warmup: int = 2

    def __post_init__(self) -> None:
        counts = [("--trials", self.trials, 1), ("--warmup", self.warmup, 0)]
        counts += [("--prompt-tokens", length, 1) for length in self.lengths or ()]
        for option, value, least in counts:
            if value < least:
                raise UserError(f"{option} is {value}; expected {least} or more.")


class CallFigures(Figures):
    """What was measured of one package."""

    name: str
    path: str
    program_sha256: str
    load_seconds: float
    seconds: dict[str, Spread]  # workload, as "8 tokens" or "1 image" -> one call


class CallsReport(Figures):
    """A whole measurement."""

    machine: Machine
    threads: int
    trials: int
    warmup: int
    packages: list[CallFigures]
    ratios: list[Ratio]  # a workload


def measure_calls(
    packages: Sequence[Package],
    calls: Calls,
    threads: int | None,
    machine: Machine,
    progress: Callable[[str], None],
) -> CallsReport:
    """Measure one package, or a package and the one it is compared with.

    Raises:
        UserError: a text does not fit a package, the packages take different inputs, or one cannot be loaded.
    """
    workloads = _workloads(packages, calls.lengths)
    count = use_threads(threads)
    callers, loads = [], []
    for package in packages:
        begin = perf_counter()
        callers.append(Caller.open(package, count))
        loads.append(perf_counter() - begin)
    seconds = {name: _alternate(callers, inputs, calls, name, progress) for name, inputs in workloads.items()}
    figures = [
        CallFigures(
            name=package.manifest.name,
            path=str(package.path),
            program_sha256=package.manifest.files[package.program_path.name].sha256,
            load_seconds=loads[index],
            seconds={name: spread(found[index]) for name, found in seconds.items()},
        )
        for index, package in enumerate(packages)
    ]
    ratios = [_ratio(name, *found) for name, found in seconds.items()] if len(packages) == 2 else []
    return CallsReport(
        machine=machine, threads=count, trials=calls.trials, warmup=calls.warmup, packages=figures, ratios=ratios
    )


def show_calls(report: CallsReport, console: Console) -> None:
    """Print the report."""
    machine = report.machine
    console.print(
        f"{machine.cpu}, {machine.physical_cores} cores, {report.threads} threads, load average "
        f"{machine.load_average:.1f}; {report.trials} trials after {report.warmup}",
        highlight=False,
        soft_wrap=True,
    )
    for package in report.packages:
        table = Table(
            title=Text(f"{package.name}, loaded in {package.load_seconds * 1e3:.0f} ms"), title_justify="left"
        )
        table.add_column("one call, ms", no_wrap=True)
        for column in ("median", "p10", "p90", "p99", "n"):
            table.add_column(column, justify="right")
        for name, found in package.seconds.items():
            cells = [f"{value * 1e3:.2f}" for value in (found.median, found.p10, found.p90, found.p99)]
            table.add_row(name, *cells, str(found.n))
        console.print(table)
    for each in report.ratios:
        console.print(f"{each.name}: the first is {each.median:.3f} times as fast as the second", highlight=False)


def _workloads(packages: Sequence[Package], lengths: Sequence[int] | None) -> dict[str, Mapping[str, torch.Tensor]]:
    """Name of each workload -> its inputs."""
    first = packages[0].manifest.methods["forward"].inputs if "forward" in packages[0].manifest.methods else []
    image = next((spec for spec in first if spec.name == PIXELS), None)
    if image is not None:
        if lengths is not None:
            raise UserError(f"--prompt-tokens: '{packages[0].manifest.name}' takes images. Leave it out.")
        return {"1 image": {PIXELS: torch.zeros(image.shape)}}
    most = min(max_tokens(package) for package in packages)
    if lengths is not None and max(lengths) > most:
        raise UserError(f"--prompt-tokens is {max(lengths)}, but a call takes {most} tokens at most: lower it.")
    sizes = [package.manifest.model.vocabulary_size or _VOCABULARY for package in packages]
    chosen = lengths or [length for length in LENGTHS if length <= most] or [most]
    return {f"{length} tokens": text_inputs(token_ids(length, min(sizes))) for length in chosen}


def _alternate(
    callers: Sequence[Caller],
    inputs: Mapping[str, torch.Tensor],
    calls: Calls,
    name: str,
    progress: Callable[[str], None],
) -> list[list[float]]:
    """Seconds of the warm calls of each package."""
    seconds: list[list[float]] = [[] for _ in callers]
    for trial in range(calls.warmup + calls.trials):
        progress(f"{name}, trial {trial - calls.warmup + 1} of {calls.trials}")
        for index in order(trial, len(callers)):
            begin = perf_counter()
            callers[index].call(inputs)
            seconds[index].append(perf_counter() - begin)
    return [each[calls.warmup :] for each in seconds]


def _ratio(name: str, first: list[float], second: list[float]) -> Ratio:
    return ratio(name, [theirs / ours for ours, theirs in zip(first, second, strict=True)])
