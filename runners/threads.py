"""How many threads the runtime uses. One thread pool serves the whole process."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from runners.errors import UserError
from runners.machine import physical_cores
from runners.runtime import native_log, portable_lib

if TYPE_CHECKING:
    from runners.program import Program

_loaded: weakref.WeakSet[Program] = weakref.WeakSet()


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
