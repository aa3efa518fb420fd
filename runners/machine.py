"""The machine a measurement ran on, and the cores this process may use."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

_FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimd", "asimddp", "i8mm", "sve")
_PACKAGES = ("pteline", "torch", "executorch", "torchao", "tokenizers")


@dataclass(frozen=True)
class Machine:
    """What a reader needs to judge a figure."""

    cpu: str
    flags: tuple[str, ...]  # vector extensions that the kernels choose between
    physical_cores: int  # that this process may use
    logical_cores: int  # that this process may use
    memory_bytes: int
    load_average: float  # runnable processes over the last minute, before the measurement
    system: str
    python: str
    versions: dict[str, str]


def describe() -> Machine:
    """Describe this machine."""
    fields = _cpu_fields()
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return Machine(
        cpu=fields.get("model name") or platform.processor() or platform.machine(),
        flags=tuple(flag for flag in _FLAGS if flag in flags),
        physical_cores=physical_cores(),
        logical_cores=len(_allowed()),
        memory_bytes=psutil.virtual_memory().total,
        load_average=psutil.getloadavg()[0],
        system=platform.platform(),
        python=platform.python_version(),
        versions={name: _version(name) for name in _PACKAGES},
    )


def physical_cores() -> int:
    """Physical cores that this process may use: its affinity, and the CPU quota of its control group."""
    cores = {_siblings(cpu) for cpu in _allowed()}
    return max(1, min(len(cores), _quota()))


def _allowed() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(psutil.cpu_count(logical=False) or 1))


def _siblings(cpu: int) -> str:
    """The hardware threads of one core, as the kernel lists them: equal for threads of the same core."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def _quota() -> int:
    """Whole CPUs that the control group allows; the number of CPUs where there is no limit."""
    unlimited = os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return unlimited
    return unlimited if quota == "max" else max(1, int(quota) // int(period))


def _cpu_fields() -> dict[str, str]:
    """The first processor's fields of ``/proc/cpuinfo``; empty elsewhere than on Linux."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    lines = text.split("\n\n")[0].splitlines()
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def peak_memory() -> int:
    """Peak resident bytes of this process.

    Linux's ``VmHWM`` starts anew when a program is executed; ``ru_maxrss`` would count the parent that started it.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return _peak_elsewhere()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def _peak_elsewhere() -> int:
    info = psutil.Process().memory_info()
    return int(getattr(info, "peak_wset", info.rss))
