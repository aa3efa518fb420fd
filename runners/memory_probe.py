"""``python -m runners.memory_probe PACKAGE PROMPT NEW START THREADS``: the memory of one trial, as one line of JSON."""

from __future__ import annotations

import sys
from pathlib import Path

from runners.bench import Workload, memory_line, run_trial
from runners.bench_report import Memory
from runners.clock import Clock
from runners.machine import peak_memory
from runners.multimodal import open_text_session
from runners.package import open_package


def main(arguments: list[str]) -> None:
    """Run one trial and print what it took."""
    path, *numbers = arguments
    prompt, new, start, threads = map(int, numbers)
    package = open_package(Path(path), verify=False)
    before = peak_memory()  # the interpreter with PyTorch and ExecuTorch imported
    clock = Clock()
    run_trial(open_text_session(package, threads, clock), clock, Workload(prompt, new, trials=1, warmup=0, at=start))
    sys.stdout.write(memory_line(Memory(peak_bytes=peak_memory(), imports_bytes=before)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
