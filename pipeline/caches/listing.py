"""Every cache and layer class of the installed transformers, and what becomes of it here.

The classes are found in the package's sources, without importing five hundred models: a class belongs to the list when
it derives, in however many steps, from one of transformers' four roots.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import transformers

from pipeline.caches import KNOWN
from pipeline.caches.layer import LayerPytree
from pipeline.caches.reasons import WHY_NOT

ROOTS = {
    "Cache": "cache",
    "CacheLayerMixin": "layer",
    "LinearAttentionCacheLayerMixin": "layer",
    "DummyLayer": "layer",
}
_CLASS = re.compile(r"^class (\w+)(?:\(([^)]*)\))?:", re.MULTILINE)


@dataclass(frozen=True)
class FoundClass:
    """A cache or layer class in transformers' sources."""

    name: str
    kind: str  # "cache" or "layer"
    file: str  # relative to the package


@dataclass(frozen=True)
class ListedClass:
    """A class, and how it is registered or why it is not."""

    name: str
    kind: str
    file: str
    registered: bool
    leaves: tuple[str, ...]  # what changes while decoding; "conv_states.*" is a table of tensors
    static: tuple[str, ...]  # what is fixed at build time
    reason: str | None  # why it is not registered


def listed_classes(package: Path | None = None) -> list[ListedClass]:
    """Return every class, caches first.

    Args:
        package: the folder of transformers; the installed one if ``None``.
    """
    rows = {row.cls.__name__: row for entry in KNOWN for row in entry.layers}
    rows |= {layer.name: layer.like for entry in KNOWN for layer in entry.model_layers}
    caches = {entry.cls.__name__: entry for entry in KNOWN}
    listed = []
    for found in found_classes(package or Path(transformers.__file__).parent):
        leaves: tuple[str, ...] = ()
        static: tuple[str, ...] = ()
        if row := rows.get(found.name):
            leaves, static = _leaves(row), row.static
        elif entry := caches.get(found.name):
            leaves, static = (*entry.leaves, "those of its layers"), entry.static
        known = found.name in rows or found.name in caches
        listed.append(
            ListedClass(found.name, found.kind, found.file, known, leaves, static, None if known else _reason(found))
        )
    return listed


def found_classes(package: Path) -> list[FoundClass]:
    """Return the classes that derive from the roots, which are those of ``cache_utils.py``, caches first."""
    sources = [(package / "cache_utils.py"), *sorted((package / "models").rglob("*.py"))]
    defined = [
        (name, bases, path)
        for path in sources
        if not path.name.startswith("modular_")  # what modeling files are generated from
        for name, bases in _definitions(path)
    ]
    kinds, found = dict(ROOTS), dict[str, FoundClass]()
    size = -1
    while size != len(found):
        size = len(found)
        for name, bases, path in defined:
            kind = ROOTS.get(name) if path.name == "cache_utils.py" else None
            kind = kind or next((kinds[base] for base in bases if base in kinds), None)
            if kind:
                kinds[name] = kind
                found[name] = FoundClass(name, kind, path.relative_to(package).as_posix())
    return sorted(found.values(), key=lambda c: (c.kind, c.file != "cache_utils.py", c.file))


def _definitions(path: Path) -> Iterator[tuple[str, list[str]]]:
    for name, bases in _CLASS.findall(path.read_text(encoding="utf-8")):
        yield name, re.findall(r"\w+", bases)


def _leaves(row: LayerPytree) -> tuple[str, ...]:
    return (*row.leaves, *(f"{name}.*" for name in (*row.tables, *row.tuples)))


def _reason(found: FoundClass) -> str:
    if reason := WHY_NOT.get(found.name):
        return reason
    what = "LayerPytree row" if found.kind == "layer" else "CachePytree entry"
    return f"unknown to this version of pteline: add a {what} for {found.name}, or a reason to WHY_NOT."
