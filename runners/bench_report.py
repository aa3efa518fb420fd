"""The figures of a measurement: their JSON, and their table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from runners.machine import Machine

_LEAST_TRIALS = 5  # for an interval: the median of fewer lies outside of all of them too often
_RESAMPLES = 2000


class Figures(BaseModel):
    """Base of every entry: immutable, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Spread(Figures):
    """Percentiles of n values, linearly interpolated."""

    median: float
    p10: float
    p90: float
    p99: float
    n: int


class Memory(Figures):
    """Resident memory of a process that ran one trial and nothing else."""

    peak_bytes: int
    imports_bytes: int  # of the peak: what the interpreter and the libraries took before the program was loaded


class PackageFigures(Figures):
    """What was measured of one package."""

    name: str
    path: str
    program_sha256: str
    memory: Memory
    load_seconds: Spread
    first_token_seconds: Spread
    prefill_tokens_per_second: Spread
    decode_tokens_per_second: Spread  # a trial
    step_seconds: Spread  # every step of every trial
    outside_seconds: Spread  # of each step: all but the program's execution (the session, the choice, the binding)
    outside_share: Spread  # the same, of the step's time: 0 to 1
    binding_seconds: Spread  # of it: the runtime's Python binding


class Ratio(Figures):
    """Speed of the first package by that of the second: above 1, the first is faster."""

    name: str
    median: float
    low: float | None  # the interval in which the median lies with 95% confidence, by bootstrap over the paired trials
    high: float | None  # None for both below ``_LEAST_TRIALS``


class SpeculationFigures(Figures):
    """Speculative against plain decoding of one text, in the same run."""

    name: str
    prompt_tokens: int
    plain_tokens_per_second: Spread  # a trial
    tokens_per_second: Spread  # a trial, with speculation
    ratio: Ratio  # of these two
    tokens_per_call: float  # with speculation
    drafted: int  # guessed tokens of all trials
    accepted: int  # of them
    tokens: int  # of an answer
    equal_tokens: int  # at its beginning, with and without speculation: in the trial that has the fewest


class BenchReport(Figures):
    """A whole measurement."""

    machine: Machine
    threads: int
    prompt_tokens: int
    new_tokens: int
    trials: int
    warmup: int
    decode_position: int
    packages: list[PackageFigures]
    ratios: list[Ratio]
    speculation: list[SpeculationFigures] = []


def spread(values: Sequence[float]) -> Spread:
    """Percentiles of at least one value."""
    median, p10, p90, p99 = (float(each) for each in np.percentile(values, [50, 10, 90, 99]))
    return Spread(median=median, p10=p10, p90=p90, p99=p99, n=len(values))


def ratio(name: str, ratios: Sequence[float]) -> Ratio:
    """The median of paired ratios with its bootstrap interval. The resampling is seeded."""
    values = np.asarray(ratios)
    if len(values) < _LEAST_TRIALS:
        return Ratio(name=name, median=float(np.median(values)), low=None, high=None)
    picks = np.random.default_rng(0).integers(len(values), size=(_RESAMPLES, len(values)))
    low, high = np.percentile(np.median(values[picks], axis=1), [2.5, 97.5])
    return Ratio(name=name, median=float(np.median(values)), low=float(low), high=float(high))


def show(report: BenchReport, console: Console) -> None:
    """Print the report."""
    machine = report.machine
    console.print(
        f"{machine.cpu}, {machine.physical_cores} cores, {', '.join(machine.flags)}, "
        f"{machine.memory_bytes / 2**30:.0f} GiB, {report.threads} threads, load average {machine.load_average:.1f}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"{report.trials} trials after {report.warmup}: prompt {report.prompt_tokens} tokens, "
        f"{report.new_tokens} new from position {report.decode_position}",
        highlight=False,
        soft_wrap=True,
    )
    labels = labels_of(report.packages)
    for label, package in zip(labels, report.packages, strict=True):
        console.print(_table(label, package))
    for each in report.ratios:
        first, second = labels
        console.print(
            f"{each.name}: {first} is {each.median:.3f} times as fast as {second} ({_interval(each)})",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )

    for found in report.speculation:
        console.print(_speculation(found), markup=False, highlight=False, soft_wrap=True)


def _speculation(found: SpeculationFigures) -> str:
    equal = "same tokens" if found.equal_tokens == found.tokens else f"same {found.equal_tokens} first tokens"
    return (
        f"speculation on {found.name} (prompt {found.prompt_tokens} tokens): {found.tokens_per_second.median:.2f} "
        f"tokens/s, {found.ratio.median:.3f} times plain decoding ({_interval(found.ratio)}); "
        f"{found.tokens_per_call:.2f} tokens a call, {found.accepted} of {found.drafted} guesses right, {equal} of "
        f"{found.tokens}"
    )


def _interval(found: Ratio) -> str:
    if found.low is None or found.high is None:
        return f"no interval: fewer than {_LEAST_TRIALS} trials"
    return f"95%: {found.low:.3f} to {found.high:.3f}"


def labels_of(packages: Sequence[PackageFigures]) -> list[str]:
    """What tells packages apart: the name; where names are equal, the directory too, and the place on the command line
    where that is one."""
    names = [package.name for package in packages]
    if len(set(names)) == len(names):
        return names
    places = [f"{package.name} ({package.path})" for package in packages]
    if len(set(places)) == len(places):
        return places
    return [f"{place} #{number}" for number, place in enumerate(places, 1)]


def _table(label: str, package: PackageFigures) -> RenderableType:
    table = Table(title=Text(label), title_justify="left", caption=_caption(package), caption_justify="left")
    table.add_column("", no_wrap=True)
    for column in ("median", "p10", "p90", "p99", "n"):
        table.add_column(column, justify="right")
    _add(table, "load, ms", package.load_seconds, 1e3)
    _add(table, "time to first token, ms", package.first_token_seconds, 1e3)
    _add(table, "prefill, tokens/s", package.prefill_tokens_per_second, 1)
    _add(table, "decode, tokens/s", package.decode_tokens_per_second, 1)
    _add(table, "step, ms", package.step_seconds, 1e3)
    _add(table, "of it outside the program, %", package.outside_share, 100)
    _add(table, "outside the program, µs", package.outside_seconds, 1e6)
    _add(table, "of that the runtime's binding, µs", package.binding_seconds, 1e6)
    return table


def _caption(package: PackageFigures) -> str:
    memory = package.memory
    return f"peak memory {memory.peak_bytes / 2**20:.0f} MiB, {memory.imports_bytes / 2**20:.0f} of them before loading"


def _add(table: Table, name: str, values: Spread, scale: float) -> None:
    cells = [f"{value * scale:.2f}" for value in (values.median, values.p10, values.p90, values.p99)]
    table.add_row(name, *cells, str(values.n))
