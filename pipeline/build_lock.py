"""One build of a name at a time: a lock on a hidden file beside the package, which ends with its process."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runners.errors import UserError


@contextmanager
def only_build_of(target: Path) -> Iterator[None]:
    """Hold the lock of ``target`` while the block runs. The file goes with it; one that a kill left stops nobody.

    Raises:
        UserError: another build holds it.
        OSError: the file cannot be made.
    """
    path = target.with_name(f".{target.name}.lock")
    descriptor = _locked(path, target)
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())  # for the other build's message
        yield
    finally:
        path.unlink(missing_ok=True)  # before the lock goes: afterwards the file may be another build's
        os.close(descriptor)


def _locked(path: Path, target: Path) -> int:
    """A descriptor that holds the lock of the file that has the name ``path`` by then."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _has_name(descriptor, path):
                return descriptor
        except BlockingIOError:
            holder = os.read(descriptor, 20).decode(errors="replace")
            os.close(descriptor)
            process = f" (process {holder})" if holder else ""
            raise UserError(
                f"package: another build{process} is writing {target}; wait until it ends, or give this one another "
                "name, as --set name=another."
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its build ended, and removed the name, between the two calls


def _has_name(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
