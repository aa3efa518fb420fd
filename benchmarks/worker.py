"""A worker as the scheduler sees it: a process that answers one request at a time and stands still otherwise."""

from __future__ import annotations

import selectors
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic

import psutil

from benchmarks.commands import module_environment
from benchmarks.errors import PeerError, last_line
from benchmarks.wire import Answer, Facts, Request, read_answer, read_facts, to_line


class Worker:
    """A running worker. Between requests it is stopped, so that no thread of its own can spin beside another's trial.

    Raises:
        PeerError: from every method: the process ended, does not answer in time, or answers with an error.
    """

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str], log: Path, load_timeout: float, timeout: float
    ) -> None:
        self._log, self._timeout = log, timeout
        self._buffer = b""
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("w") as stream:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stream,
                    env=module_environment(variables),
                    bufsize=0,
                )
        except OSError as error:
            raise PeerError(f"{command[0]}: {error.strerror}") from error
        self._info = psutil.Process(self._process.pid)
        try:
            self.facts = self._first(load_timeout)
        except BaseException:
            self.close()
            raise
        self._info.suspend()

    def ask(self, request: Request) -> Answer:
        """Let the process go on, do what is asked, and stop it again."""
        if self._process.poll() is not None:
            raise PeerError(self._ended())
        self._info.resume()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(to_line(request).encode() + b"\n")
            line = self._line(self._timeout)
        except BrokenPipeError as error:
            raise PeerError(self._ended()) from error
        self._info.suspend()
        answer = self._parse(line)
        if answer.error:
            raise PeerError(answer.error)
        return answer

    def cpu_seconds(self) -> float:
        """Processor seconds that the process has taken so far."""
        try:
            times = self._info.cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _first(self, timeout: float) -> Facts:
        line = self._line(timeout)
        try:
            found = read_facts(line)
        except (ValueError, TypeError) as error:
            raise PeerError(f"its first line is no description of itself: {line[:200]!r}") from error
        if isinstance(found, Answer):
            raise PeerError(found.error)
        return found

    def _parse(self, line: str) -> Answer:
        try:
            return read_answer(line)
        except (ValueError, KeyError, TypeError) as error:
            raise PeerError(f"it answered with no answer: {line[:200]!r}") from error

    def _line(self, timeout: float) -> str:
        """The next line of the process."""
        assert self._process.stdout is not None
        end = monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, end - monotonic())):
                    raise PeerError(f"no answer within {timeout:.0f} s")
                data = self._process.stdout.read(1 << 16)
                if not data:
                    raise PeerError(self._ended())
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode(errors="replace")

    def _ended(self) -> str:
        code = self._process.wait()
        return f"its process ended with {code}: {last_line(self._log.read_text(errors='replace'))}"
