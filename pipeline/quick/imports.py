"""Import large libraries in less time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import yaml  # type: ignore[import-untyped]
from ruamel import yaml as ruamel

from pipeline.substitution import replaced

_FAST = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a build of PyYAML may lack the former


@contextmanager
def quick_imports() -> Iterator[None]:
    """Around imports: nothing is collected within, what is there at the end never is, and YAML is read by C code.

    A collection visits every object; the libraries of a build make a million of them, none of which is ever garbage.
    Where nothing was imported, or an import failed, what is there can be garbage as ever.
    executorch reads a large table of operators when it is imported, by a parser that is written in Python.
    """
    was_enabled, known = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        with replaced(ruamel, "YAML", _Yaml):
            yield
        if len(sys.modules) > known:
            gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


class _Yaml(ruamel.YAML):
    """ruamel's, except that ``YAML(typ="safe").load`` of a text is PyYAML's."""

    def load(self, stream: object) -> object:
        if self.typ == ["safe"] and not self.pure and isinstance(stream, str):
            return yaml.load(stream, Loader=_FAST)  # a safe one
        return super().load(stream)
