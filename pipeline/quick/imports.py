"""Import large libraries in less time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import yaml  # type: ignore[import-untyped]
from ruamel import yaml as ruamel

from pipeline.quick.substitution import replaced

_FAST = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a build of PyYAML may lack the former


@contextmanager
def quick_imports() -> Iterator[None]:
    """Around imports: nothing is collected within, what is there at the end never is, and YAML is read by C code.

    A collection visits every object; the libraries of a build make a million of them, none of which is ever garbage.
    executorch reads a large table of operators when it is imported, by a parser that is written in Python.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with replaced(ruamel, "YAML", _Yaml):
            yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


class _Yaml:
    """Stands for ruamel's ``YAML(typ="safe")``."""

    def __init__(self, *, typ: str) -> None:
        assert typ == "safe"

    def load(self, text: str) -> object:
        return yaml.load(text, Loader=_FAST)  # a safe one
