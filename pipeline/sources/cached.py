"""The user's cache: what was downloaded or converted lies there whole, or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.sources.fetched import folder_digest
from runners.errors import UserError

RECORD = ".pteline-digest"  # in a kept folder: the digest of all its other files


def cache_directory() -> Path:
    """``$PTELINE_CACHE``, else ``$XDG_CACHE_HOME/pteline``, else ``~/.cache/pteline``."""
    if own := os.environ.get("PTELINE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pteline"


def make_directory(directory: Path) -> None:
    """Make ``directory`` of the cache and those above it.

    Raises:
        UserError: the system does not allow it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        advice = "set PTELINE_CACHE to a directory that can be written"
        raise UserError(f"{directory}: the cache cannot be made: {error.strerror}; {advice}") from error


@contextmanager
def work_folder() -> Iterator[Path]:
    """A folder in the cache itself, so that the final rename stays on one file system; removed whatever happens."""
    make_directory(cache_directory())
    with tempfile.TemporaryDirectory(dir=cache_directory(), prefix=".download-") as temporary:
        yield Path(temporary)


def kept_folder(place: Path, fill: Callable[[Path], None]) -> Path:
    """The folder at ``place``; where it is missing or damaged, ``fill`` writes it into an empty folder first.

    Raises:
        UserError: what ``fill`` raises (nothing is kept then), or the cache cannot be written.
    """
    if place.is_dir():
        if _intact(place):
            return place
        warnings.warn(f"{place} is damaged; it is removed and made again", stacklevel=2)
        shutil.rmtree(place)
    with work_folder() as temporary:
        made = temporary / place.name
        made.mkdir()
        fill(made)
        (made / RECORD).write_text(_digest(made))
        make_directory(place.parent)
        try:
            made.rename(place)
        except OSError:
            # another build may have been faster; a rename never replaces a folder that holds files
            if not (place.is_dir() and _intact(place)):
                raise
    return place


def _intact(place: Path) -> bool:
    record = place / RECORD
    return record.is_file() and record.read_text() == _digest(place)


def _digest(folder: Path) -> str:
    return folder_digest((path for path in folder.rglob("*") if path.is_file() and path.name != RECORD), folder)
