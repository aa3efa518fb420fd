"""What the scheduler and a worker say to each other: one JSON object a line. Standard library only.

A worker is one process with one model. It answers each request with one line, on the descriptor that was its standard
output when it began; whatever its libraries print goes to standard error.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

Order = Literal["prefill", "decode", "score", "peak"]


@dataclass(frozen=True)
class Options:
    """What a worker is started with, its one argument."""

    model: str  # a file or folder that the engine loads
    threads: int
    max_length: int  # positions the cache must hold
    variant: str = ""  # tells engines that serve several peers which one they are


@dataclass(frozen=True)
class Request:
    """One request; all but the last begin with an empty cache.

    ``prefill``: feed ``ids`` at once. ``decode``: feed ``context`` untimed, then ``ids`` one by one. ``score``: feed
    ``ids`` one by one and sum what each next one costs in nats. ``peak``: tell the process's peak memory.
    """

    order: Order
    ids: tuple[int, ...] = ()
    context: tuple[int, ...] = ()


@dataclass(frozen=True)
class Facts:
    """What an engine says of itself once it is loaded; the first line a worker writes."""

    threads: int
    max_length: int  # positions that its cache holds
    versions: dict[str, str]
    imports_bytes: int = 0  # peak memory before the model was loaded
    load_seconds: float = 0.0


@dataclass(frozen=True)
class Answer:
    """The answer to a request; ``error`` is the only field of one that failed."""

    seconds: tuple[float, ...] = ()  # of the call (prefill), of each call (decode)
    tokens: tuple[int, ...] = ()  # greedy choices: after the last token (prefill), after each (decode)
    position: int = 0  # tokens in the engine's cache afterwards, by its own count where it has one
    nats: float = 0.0
    peak_bytes: int = 0
    error: str = ""


def to_line(message: Options | Request | Facts | Answer) -> str:
    """One line of JSON, without its end."""
    return json.dumps(asdict(message), separators=(",", ":"))


def read_options(line: str) -> Options:
    """Parse a worker's argument."""
    return Options(**json.loads(line))


def read_request(line: str) -> Request:
    """Parse a request."""
    data = json.loads(line)
    return Request(data["order"], tuple(data["ids"]), tuple(data["context"]))


def read_answer(line: str) -> Answer:
    """Parse an answer.

    Raises:
        ValueError, KeyError, TypeError: the line is no answer.
    """
    data = json.loads(line)
    return Answer(**{**data, "seconds": tuple(data["seconds"]), "tokens": tuple(data["tokens"])})


def read_facts(line: str) -> Facts | Answer:
    """Parse a worker's first line: facts, or the error that kept it from loading.

    Raises:
        ValueError, TypeError: the line is neither.
    """
    data = json.loads(line)
    return Answer(error=data["error"]) if "error" in data else Facts(**data)
