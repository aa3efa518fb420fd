"""Spare the garbage collector what a process keeps to its end."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_for_good() -> Iterator[None]:
    """Around imports of large libraries: nothing is collected within, and what is there at the end never is.

    A collection visits every object; the libraries of a build make a million of them, none of which is ever garbage.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
