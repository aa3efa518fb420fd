"""Trace, and interpret what was traced, with the same result and less repeated work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from pipeline.quick.cached_shapes import cached_shapes
from pipeline.quick.compiled_when_called import compiled_when_called
from pipeline.quick.remembered_sizes import remembered_sizes
from pipeline.quick.trees import quick_trees


@contextmanager
def quick_tracing() -> Iterator[None]:
    """For a scope around ``torch.export.export`` and ``run_decompositions``. It holds for all threads."""
    with ExitStack() as stack:
        for scope in (cached_shapes, compiled_when_called, remembered_sizes, quick_trees):
            stack.enter_context(scope())
        yield
