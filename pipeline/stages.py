"""Time a stage, watch its memory, and show that it is at work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from runners.manifest import StageFigure

_SAMPLE_SECONDS = 0.1
_GIB = 1 << 30


@dataclass
class Stages:
    """The stages of one build: a live line each on a terminal, a plain line each if ``verbose``, nothing otherwise."""

    console: Console
    verbose: bool = False
    figures: dict[str, StageFigure] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str, *, cached: bool = False) -> Iterator[Callable[[str], None]]:
        """Measure and show the stage ``name`` while the block runs. A stage that fails leaves no figure.

        The block is given a function that says on the live line what the stage is at.
        """
        watch = _Watch()
        with watch, self._line(name, watch):
            yield watch.say
        self.figures[name] = watch.figure(cached)
        if self.verbose or self.console.is_terminal:
            self.console.print(_summary(name, self.figures[name]), highlight=False)

    @contextmanager
    def _line(self, name: str, watch: _Watch) -> Iterator[None]:
        if not self.console.is_terminal:
            yield
            return
        with Live(_Running(name, watch), console=self.console, refresh_per_second=8, transient=True):
            yield


class _Running:
    """What the live line shows: it is asked anew at each refresh."""

    def __init__(self, name: str, watch: _Watch) -> None:
        self._name, self._watch, self._spinner = name, watch, Spinner("dots")

    def __rich__(self) -> Spinner:
        self._spinner.update(
            text=Text(
                f"{self._name:<10} {self._watch.seconds:6.1f} s  {self._watch.now / _GIB:5.2f} GiB  {self._watch.at}"
            )
        )
        return self._spinner


class _Watch:
    """Wall time, processor time and peak resident memory of this process while the block runs."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._begin, self._cpu = time.perf_counter(), time.process_time()
        self.now = self.peak = self._process.memory_info().rss
        self.at = ""

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._begin

    def say(self, text: str) -> None:
        self.at = text

    def figure(self, cached: bool) -> StageFigure:
        return StageFigure(
            seconds=round(self._seconds, 3),
            cpu_seconds=round(self._cpu_seconds, 3),
            peak_bytes=self.peak,
            cached=cached,
        )

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._seconds, self._cpu_seconds = self.seconds, time.process_time() - self._cpu
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            self.now = self._process.memory_info().rss
            self.peak = max(self.peak, self.now)
            if self._stop.wait(_SAMPLE_SECONDS):
                return


def _summary(name: str, figure: StageFigure) -> str:
    source = "  (from the stage cache)" if figure.cached else ""
    times = f"{figure.seconds:6.1f} s  {figure.cpu_seconds:6.1f} s cpu"
    return f"{name:<10} {times}  {figure.peak_bytes / _GIB:5.2f} GiB{source}"
