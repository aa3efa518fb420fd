"""Take files out of a wheel or zip by strangers: only regular files, only inside the target, only so many bytes."""

from __future__ import annotations

import difflib
import lzma
import shutil
import stat
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from runners.errors import UserError

LARGEST = 64 * 2**30  # bytes, unpacked: more than any model this machine could load
MOST_FILES = 10_000
# what zipfile raises on bytes that make no sense; RuntimeError: encrypted, or compressed by a method it does not know
_DAMAGE = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError)


def append(archive: Path, member: str, stream: IO[bytes]) -> None:
    """Write the content of the file ``member`` to ``stream``; no name from the archive becomes a path.

    Raises:
        UserError: no such member, or the archive is damaged.
    """
    with _opened(archive) as opened:
        names = [info.filename for info in opened.infolist() if not info.is_dir()]
        if member not in names:
            raise UserError(f"model.source: {archive.name} has no file {member!r}; {_nearest(member, names)}")
        with opened.open(member) as inside:
            shutil.copyfileobj(inside, stream)


def extract_folder(archive: Path, folder: str, target: Path) -> None:
    """Write the files directly in ``folder`` (with a trailing slash) into ``target``; deeper ones are left out.

    Raises:
        UserError: the folder is not there or holds no file, or what :func:`extract_all` refuses.
    """
    with _opened(archive) as opened:
        infos = [info for info in opened.infolist() if not info.is_dir()]
        inside = {info.filename.removeprefix(folder): info for info in infos if info.filename.startswith(folder)}
        direct = [(name, info) for name, info in inside.items() if "/" not in name]
        if not direct:
            folders = sorted({f"{PurePosixPath(info.filename).parent}/" for info in infos})
            raise UserError(f"model.source: {archive.name} has no files in {folder!r}; {_nearest(folder, folders)}")
        _write(opened, direct, archive, target)


def extract_all(archive: Path, target: Path) -> None:
    """Write every file of a zip below ``target``.

    Raises:
        UserError: damaged; or a file would be a link, lie outside ``target`` or be written twice; or there is too much.
    """
    with _opened(archive) as opened:
        _write(opened, [(info.filename, info) for info in opened.infolist() if not info.is_dir()], archive, target)


def _write(opened: zipfile.ZipFile, files: Iterable[tuple[str, zipfile.ZipInfo]], archive: Path, target: Path) -> None:
    checked = [(_safe(name, info, archive), info) for name, info in files]
    names = {str(path).casefold() for path, _ in checked}
    folders = {str(parent).casefold() for path, _ in checked for parent in path.parents}
    if len(names) < len(checked) or names & folders:
        raise UserError(f"model.source: {archive.name} holds two files of one name; expected each once")
    # zipfile never yields more bytes of a file than its entry announces, so the sum bounds what is written
    size = sum(info.file_size for _, info in checked)
    if size > LARGEST or len(checked) > MOST_FILES:
        raise UserError(
            f"model.source: {archive.name} unpacks to {len(checked):,} files of {size:,} bytes together; "
            f"expected at most {MOST_FILES:,} files and {LARGEST:,} bytes"
        )
    for path, info in checked:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        with opened.open(info) as inside, (target / path).open("xb") as outside:
            shutil.copyfileobj(inside, outside)


def _safe(name: str, info: zipfile.ZipInfo, archive: Path) -> PurePosixPath:
    """``name`` as a path below the target."""
    path = PurePosixPath(name)
    kind = stat.S_IFMT(info.external_attr >> 16)
    if kind not in (0, stat.S_IFREG):
        raise UserError(f"model.source: {archive.name}: {name!r} is no regular file (a link or device); not unpacked")
    if path.is_absolute() or not path.parts or {"..", "."} & set(name.split("/")) or set(name) & set("\\:\0"):
        raise UserError(f"model.source: {archive.name}: {name!r} would lie outside the folder; nothing is unpacked")
    return path


@contextmanager
def _opened(archive: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(archive) as opened:
            yield opened
    except _DAMAGE as error:
        raise UserError(f"model.source: {archive.name} is damaged: {error}; try again") from error


def _nearest(wanted: str, names: list[str]) -> str:
    close = difflib.get_close_matches(wanted, names, n=3, cutoff=0.3)
    return f"nearest: {', '.join(close or names[:3])}"
