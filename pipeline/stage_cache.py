"""A content-addressed cache of stage results, so that changing a later setting does not repeat an earlier stage.

The key is a digest of everything that a result depends on: the settings of its stage and of those before it, the
source's digest, the versions of the libraries, and this project's own code.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

import psutil
from pydantic import JsonValue
from safetensors import SafetensorError

LIBRARIES = ("torch", "executorch", "torchao", "transformers", "gguf", "safetensors", "tokenizers")
LIMIT_BYTES = 8 << 30  # of all entries; the least recently used ones go first
_DONE = "complete"  # a file that an entry has once it is whole
_UNFINISHED = ".new-"  # then the id of the process that writes the entry
_WRITING_FAILED = (OSError, RuntimeError, SafetensorError)  # torch and safetensors wrap the system's own error


@dataclass(frozen=True)
class StageCache:
    """Entries are directories ``<root>/<stage>-<digest>``; None as the root turns the cache off."""

    root: Path | None

    def find(self, stage: str, key: str) -> Path | None:
        """Return the entry's directory, or None."""
        if self.root is None:
            return None
        entry = self.root / f"{stage}-{key}"
        if not (entry / _DONE).is_file():
            return None
        os.utime(entry)
        return entry

    def store(self, stage: str, key: str, write: Callable[[Path], None]) -> None:
        """Let ``write`` fill a new entry, which appears whole or not at all. A full disk costs it, not the build."""
        if self.root is None:
            return
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            prefix = f"{_UNFINISHED}{os.getpid()}-"
            with tempfile.TemporaryDirectory(prefix=prefix, dir=self.root, ignore_cleanup_errors=True) as folder:
                temporary = Path(folder) / "entry"
                temporary.mkdir()
                write(temporary)
                (temporary / _DONE).touch()
                target = self.root / f"{stage}-{key}"
                shutil.rmtree(target, ignore_errors=True)
                temporary.rename(target)
            self._prune(keep=target)
        except _WRITING_FAILED:
            return

    def _prune(self, keep: Path) -> None:
        """Drop what a killed build left, and the entries that were not used for longest; never ``keep``."""
        assert self.root is not None
        total = 0
        for entry in sorted(self.root.iterdir(), key=lambda e: (e == keep, e.stat().st_mtime), reverse=True):
            if entry.name.startswith(_UNFINISHED):
                drop = not psutil.pid_exists(int(entry.name.removeprefix(_UNFINISHED).partition("-")[0]))
            else:
                total += sum(f.stat().st_size for f in entry.rglob("*") if f.is_file())
                drop = total > LIMIT_BYTES and entry != keep
            if drop:
                shutil.rmtree(entry, ignore_errors=True)


def key_of(*parts: JsonValue) -> str:
    """Return the digest of JSON values, the libraries' versions and this project's code."""
    everything = [list(parts), library_versions(), _code_digest()]
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:32]


def library_versions() -> dict[str, str]:
    """Return the installed versions of the libraries that decide what a stage produces."""
    return {name: version(name) for name in LIBRARIES}


@cache  # of the code that runs: an edit under a running build does not change that
def _code_digest() -> str:
    digest = hashlib.sha256()
    folder = Path(__file__).parents[1]
    for file in sorted(file for part in ("pipeline", "runners") for file in (folder / part).rglob("*.py")):
        digest.update(file.relative_to(folder).as_posix().encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
