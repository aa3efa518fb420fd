"""Wheels made here, and pip told that there are no others: what a ``pypi:`` source finds without a network."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest


def write(folder: Path, name: str, version: str, files: Mapping[str, bytes | str]) -> Path:
    """A wheel with ``files``; installing it would fail, for it requires what does not exist."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    path = folder / f"{module}-{version}-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: none-such\n"
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(path, "w") as wheel:
        for member, content in files.items():
            wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", tags)
        wheel.writestr(f"{info}/RECORD", "")
    return path


def only_index(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``folder`` pip's only index and ``cache`` the user's cache."""
    monkeypatch.setenv("PTELINE_CACHE", str(cache))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
