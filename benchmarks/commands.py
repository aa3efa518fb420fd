"""Run a command that installs or builds something, and measure what it costs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.errors import PeerError, last_line
from benchmarks.records import BuildCost

ROOT = Path(__file__).resolve().parents[1]
_POLL_SECONDS = 0.2


def module_environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables for a process that runs a module of this project with any interpreter."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "PYTHONPATH": path, "OMP_WAIT_POLICY": "PASSIVE", **(variables or {})}


def run(command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None) -> BuildCost:
    """Run ``command`` with its output in ``log``.

    Returns:
        its seconds, processor seconds with those of its children, and its peak resident bytes, its children's left out.

    Raises:
        PeerError: it cannot start or fails; the message is its last error line.
    """
    begin = time.perf_counter()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as stream:
        try:
            process = subprocess.Popen(command, stdout=stream, stderr=stream, env=module_environment(variables))
        except OSError as error:
            raise PeerError(f"{command[0]}: {error.strerror}") from error
        peak, cpu, status = _wait(process)
    if status != 0:
        raise PeerError(f"{last_line(log.read_text(errors='replace'))} (all of it: {log})")
    return BuildCost(seconds=time.perf_counter() - begin, cpu_seconds=cpu, peak_bytes=peak)


def _wait(process: subprocess.Popen[bytes]) -> tuple[int, float, int]:
    """Peak bytes, processor seconds and exit code. Peaks are sampled: ``ru_maxrss`` begins with the parent's."""
    peak = 0
    try:
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                process.returncode = os.waitstatus_to_exitcode(status)
                return peak, usage.ru_utime + usage.ru_stime, process.returncode
            peak = max(peak, _peak_of(process.pid))
            time.sleep(_POLL_SECONDS)
    except BaseException:
        process.kill()
        raise


def _peak_of(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)


def python(module: str, *arguments: str, interpreter: str | Path = sys.executable) -> tuple[str, ...]:
    """The command that runs a module of this project."""
    return (str(interpreter), "-m", module, *arguments)
