"""Give the system back the memory that a stage has let go."""

from __future__ import annotations

import ctypes
import gc
import sys


def give_back() -> None:
    """Collect what is garbage, graphs above all, whose nodes know each other; and return what the C library keeps.

    It keeps freed memory for the next request, and the next stage asks for tensors of other sizes.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None  # glibc's
    if trim is not None:
        trim(0)
