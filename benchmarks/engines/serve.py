"""The loop of a worker process, the same for every engine. V vocabulary.

Every engine is timed by the same few lines, so that a step is the same work for all: a token goes in, the greedy choice
comes out.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Protocol

import numpy as np

from benchmarks.wire import Answer, Facts, Options, Request, read_options, read_request, to_line


class Engine(Protocol):
    """A loaded model that decodes one sequence at a time."""

    @property
    def position(self) -> int:
        """Tokens in the cache."""
        ...

    def facts(self) -> Facts:
        """What it is."""
        ...

    def reset(self) -> None:
        """Begin with an empty cache."""
        ...

    def feed(self, ids: list[int]) -> int:
        """Append tokens to the cache, and choose the next one greedily."""
        ...

    def logits(self) -> np.ndarray:
        """Logits after the last token fed: float [V], valid until the next call."""
        ...


def serve(load: Callable[[Options], Engine]) -> None:
    """Load the engine that ``load`` makes of the argument, say what it is, then answer until the input ends."""
    _die_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print where they like: the answers keep a descriptor of their own
    imports = peak_memory()
    begin = perf_counter()
    try:
        engine = load(read_options(sys.argv[1]))
        facts = engine.facts()
    except Exception as error:  # whatever an engine raises, the scheduler is told and goes on without it
        answers.write(to_line(Answer(error=describe(error))) + "\n")
        return
    seconds = perf_counter() - begin
    line = to_line(Facts(**{**facts.__dict__, "imports_bytes": imports, "load_seconds": seconds}))
    answers.write(line + "\n")
    for request in sys.stdin:
        answers.write(to_line(answer(engine, read_request(request))) + "\n")


def answer(engine: Engine, request: Request) -> Answer:
    """Do what is asked; an error becomes an answer too."""
    try:
        if request.order == "prefill":
            return _prefill(engine, request)
        if request.order == "decode":
            return _decode(engine, request)
        if request.order == "score":
            return Answer(nats=_score(engine, request), position=engine.position)
        return Answer(peak_bytes=peak_memory())
    except Exception as error:
        return Answer(error=describe(error))


def describe(error: Exception) -> str:
    """The last line of an error's text, which says most, with its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    return f"{type(error).__name__}: {lines[-1][:300]}"


def _prefill(engine: Engine, request: Request) -> Answer:
    engine.reset()
    ids = list(request.ids)
    begin = perf_counter()
    token = engine.feed(ids)
    return Answer(seconds=(perf_counter() - begin,), tokens=(token,), position=engine.position)


def _decode(engine: Engine, request: Request) -> Answer:
    engine.reset()
    if request.context:
        engine.feed(list(request.context))
    seconds, tokens = [], []
    for token in request.ids:
        begin = perf_counter()
        tokens.append(engine.feed([token]))
        seconds.append(perf_counter() - begin)
    return Answer(seconds=tuple(seconds), tokens=tuple(tokens), position=engine.position)


def _score(engine: Engine, request: Request) -> float:
    """Sum of -ln softmax(logits)[next], nats, over all tokens but the first."""
    engine.reset()
    total = 0.0
    for token, following in zip(request.ids, request.ids[1:], strict=False):
        engine.feed([token])
        logits = np.asarray(engine.logits(), dtype=np.float64)
        highest = logits.max()
        total += float(highest + np.log(np.exp(logits - highest).sum()) - logits[following])
    return total


def _die_with_parent() -> None:
    """A stopped process would outlive a scheduler that was killed, and hold its memory."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def peak_memory() -> int:
    """Peak resident bytes of this process; 0 where the system does not tell. ``VmHWM`` leaves out the parent's."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


def versions_of(*names: str) -> dict[str, str]:
    """Installed versions of distributions."""
    return {name: metadata.version(name) for name in names}
