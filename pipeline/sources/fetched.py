"""What every kind of source gives: a folder or a file on this machine, and its digest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runners.errors import UserError
from runners.package import sha256_of


@dataclass(frozen=True)
class Fetched:
    """A source on this machine, checked as far as that is possible without loading it."""

    path: Path  # of the folder or of the .gguf file
    kind: Literal["folder", "gguf"]
    digest: str  # sha256 of the file, or of the sorted names and sha256 of the folder's files
    revision: str | None  # the commit that a hub revision stood for
    licence: str | None  # as the source states it
    has_tokenizer: bool


def folder_digest(files: Iterable[Path], folder: Path) -> str:
    """The sha256 over name and sha256 of each file, sorted by name: independent of the folder's place and dates."""
    lines = sorted(f"{file.relative_to(folder).as_posix()} {sha256_of(file)}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def check_digest(found: str, expected: str | None, what: str) -> None:
    """Refuse a file that is not the one the configuration pins.

    Raises:
        UserError: ``expected`` is given and is not ``found``.
    """
    if expected is not None and found != expected:
        raise UserError(
            f"{what}: its sha256 is {found}, but model.sha256 says {expected}; "
            "this is another file than the configuration was written for: check the source, or correct model.sha256"
        )
