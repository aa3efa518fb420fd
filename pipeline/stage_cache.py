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
from importlib.metadata import version
from pathlib import Path

from pydantic import JsonValue

LIBRARIES = ("torch", "executorch", "torchao", "transformers", "gguf", "safetensors", "tokenizers")
LIMIT_BYTES = 8 << 30  # of all entries; the least recently used ones go first
_DONE = "complete"  # a file that an entry has once it is whole


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
        self.root.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=self.root))
        try:
            write(temporary)
            (temporary / _DONE).touch()
            target = self.root / f"{stage}-{key}"
            shutil.rmtree(target, ignore_errors=True)
            temporary.rename(target)
        except OSError:
            pass
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self._prune()

    def _prune(self) -> None:
        assert self.root is not None
        entries = sorted(self.root.iterdir(), key=lambda e: e.stat().st_mtime, reverse=True)
        total = 0
        for entry in entries:
            total += sum(f.stat().st_size for f in entry.rglob("*") if f.is_file())
            if total > LIMIT_BYTES:
                shutil.rmtree(entry, ignore_errors=True)


def key_of(*parts: JsonValue) -> str:
    """Return the digest of JSON values, the libraries' versions and this package's code."""
    everything = [list(parts), library_versions(), _code_digest()]
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:32]


def library_versions() -> dict[str, str]:
    """Return the installed versions of the libraries that decide what a stage produces."""
    return {name: version(name) for name in LIBRARIES}


def _code_digest() -> str:
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.relative_to(folder).as_posix().encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
