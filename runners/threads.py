"""How many threads the runtime uses. One thread pool serves the whole process."""

from __future__ import annotations

import ctypes
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from runners.errors import UserError
from runners.machine import physical_cores
from runners.runtime import native_log, portable_lib

if TYPE_CHECKING:
    from runners.program import Program

_loaded: weakref.WeakSet[Program] = weakref.WeakSet()
_TORCH_CPU = ("libtorch_cpu.so", "libtorch_cpu.dylib", "torch_cpu.dll")  # what holds PyTorch's MKL, of each system


def use_threads(threads: int | None) -> int:
    """Set the size of the runtime's thread pool, and return it.

    None leaves it as it is while a program is loaded, and otherwise means the physical cores this process may use.
    PyTorch only samples from one row of logits here: it gets one thread, for its pool would spin beside the runtime's.

    Raises:
        UserError: ``threads`` is below 1, or a loaded program uses the pool with another size.
    """
    with native_log():  # the first call creates the pool, and tells of every file it reads to count cores
        current = int(portable_lib._threadpool_get_thread_count())
    default = current if len(_loaded) else physical_cores()
    wanted = default if threads is None else threads
    if wanted < 1:
        raise UserError(f"--threads is {wanted}; expected 1 or more.")
    torch.set_num_threads(1)
    _let_blas_use_its_caller_alone()
    if wanted != current:
        _resize(wanted, current)
    return wanted


def _resize(wanted: int, current: int) -> None:
    # Backends keep a pointer to the pool they were loaded with: it may only be replaced while no program is loaded.
    if len(_loaded):
        raise UserError(f"{wanted} threads were asked for, but a loaded program uses {current}: use the same number.")
    with native_log():
        portable_lib._unsafe_reset_threadpool(wanted)


def holds_threads(program: Program) -> None:
    """Note that ``program`` uses the pool until it is freed."""
    _loaded.add(program)


def _let_blas_use_its_caller_alone() -> None:
    """Have MKL multiply matrices on the thread that asks for it, in every thread that has no number of its own.

    ``llama::custom_sdpa`` calls PyTorch's MKL from the runtime's pool. ``torch.set_num_threads`` sets the number of the
    calling thread only, so that MKL would start OpenMP's threads for each of the pool's own, and these spin and
    slow a step down. MKL's environment variables are read before this module is. A thread that asks
    PyTorch for a number keeps it. Without MKL, or where the library does not show it (on ARM, say), nothing is done.
    """
    for library in torch_cpu_libraries():
        set_threads = getattr(library, "mkl_serv_set_num_threads", None)
        if set_threads is not None:
            set_threads(1)


def torch_cpu_libraries() -> list[ctypes.CDLL]:
    """PyTorch's library for the CPU, which this process has loaded; nothing where it has another name.

    By its whole name: beside ``torch_cpu.dll`` lies a ``torch_cpu.lib``, which cannot be loaded.
    """
    folder = Path(torch.__file__).with_name("lib")
    return [ctypes.CDLL(str(folder / name)) for name in _TORCH_CPU if (folder / name).is_file()]
