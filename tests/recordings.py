"""Speech: the test data of PocketSphinx (BSD licence), from Debian's package of it. Linux with ``apt`` only."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

PACKAGE = "pocketsphinx-testdata"
_INSIDE = Path("usr/share/pocketsphinx/test/data")
NAMES = [
    *(f"librivox/sense_and_sensibility_01_austen_64kb-0{n}.wav" for n in (870, 880, 890, 920, 930)),
    *(f"cards/00{n}.wav" for n in range(1, 6)),
]


def recordings(cache: Path) -> list[Path]:
    """The WAV files, from ``cache`` once they are there. Without apt, or where it finds no such package: skip."""
    folder = cache / PACKAGE
    if not folder.exists():
        if any(shutil.which(tool) is None for tool in ("apt-get", "dpkg")):
            pytest.skip(f"the recordings come from the Debian package {PACKAGE}, and there is no apt-get here")
        _fetch(folder)
    return [folder / _INSIDE / name for name in NAMES]


def _fetch(folder: Path) -> None:
    temporary = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    done = subprocess.run(["apt-get", "download", PACKAGE], cwd=temporary, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"apt-get finds no {PACKAGE}: {done.stderr.strip().splitlines()[-1:]}")
    (file,) = temporary.glob("*.deb")
    subprocess.run(["dpkg", "-x", file.name, "."], cwd=temporary, check=True)
    temporary.rename(folder)
