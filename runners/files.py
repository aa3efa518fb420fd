"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from runners.errors import UserError


def require_writable(path: Path) -> None:
    """Refuse a file that could not be written, before the work whose result it is to hold.

    Raises:
        UserError: ``path`` is a directory, or its directory is missing or closed to this user.
    """
    parent = path.parent
    if path.is_dir():
        raise UserError(f"{path} is a directory; give the name of a file.")
    if not parent.is_dir():
        raise UserError(f"{path}: the directory {parent} does not exist; create it first.")
    if not os.access(parent, os.W_OK):
        raise UserError(f"{path}: no permission to write into {parent}; give another place.")


def write_text(path: Path, text: str) -> None:
    """Write a file in one go: to a temporary neighbour first, which then takes its name."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
