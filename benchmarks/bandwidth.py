"""``python -m benchmarks.bandwidth THREADS``: how fast this machine reads memory, one number of bytes a second.

A buffer far larger than any cache is summed by as many threads as the peers use, by torch and by numpy with a part for
each thread. The fastest pass counts: what disturbs a pass, and a sum that computes too slowly, only makes it slower.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import numpy as np
import torch

from benchmarks.commands import module_environment, python
from benchmarks.errors import PeerError, last_line

BYTES = 1 << 30
_PASSES = 5


def measure(threads: int, size: int = BYTES) -> float:
    """Bytes a second, read in this process."""
    buffer = np.ones(size // 8, dtype=np.int64)
    parts = np.array_split(buffer, threads)
    floats = torch.from_numpy(buffer.view(np.float32))
    torch.set_num_threads(threads)
    with ThreadPoolExecutor(threads) as pool:
        ways: list[Callable[[], object]] = [lambda: list(pool.map(np.sum, parts)), floats.sum]
        seconds = [_seconds(way) for way in ways * _PASSES]
    return buffer.nbytes / min(seconds)


def _seconds(way: Callable[[], object]) -> float:
    begin = perf_counter()
    way()
    return perf_counter() - begin


def in_a_process(threads: int) -> float:
    """The same in a process of its own, whose memory is free again afterwards.

    Raises:
        PeerError: the process failed.
    """
    command = python("benchmarks.bandwidth", str(threads))
    done = subprocess.run(command, env=module_environment(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PeerError(f"the bandwidth could not be measured: {last_line(done.stderr)}")
    return float(done.stdout)


if __name__ == "__main__":
    sys.stdout.write(f"{measure(int(sys.argv[1]))}\n")
