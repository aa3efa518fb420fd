"""Lower with the same result and far less repeated work.

executorch 1.5.1 interprets the whole program anew in every pass, runs every XNNPACK pass on every delegate, decomposes
a program three times, copies the growing history of each node at each step, and compiles every graph that it makes.
Substitutions leave out what adds nothing new. Each holds for the length of a scope, and the program made is the same,
byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from pipeline.quick.decomposed_once import decomposed_once
from pipeline.quick.remembered_values import remembered_values
from pipeline.quick.short_provenance import short_provenance
from pipeline.quick.tracing import quick_tracing
from pipeline.quick.xnnpack_passes import only_needed_passes

_SCOPES = (
    short_provenance,
    only_needed_passes,
    remembered_values,
    decomposed_once,
    quick_tracing,
)


@contextmanager
def quick_lowering() -> Iterator[None]:
    """All, for a scope around ``to_edge_transform_and_lower`` and ``to_executorch``. They hold for all threads."""
    with ExitStack() as stack:
        for scope in _SCOPES:
            stack.enter_context(scope())
        yield
