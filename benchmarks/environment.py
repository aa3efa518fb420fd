"""Environments of the peers: made on demand below the cache directory, kept until their requirements change."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.commands import run

_STAMP = "installed.json"


@dataclass(frozen=True)
class Environment:
    """What pip installs for a peer. Whoever needs torch pins the project's version: a CUDA one takes gigabytes."""

    name: str
    requirements: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)  # for the installation, "CMAKE_ARGS" and the like


def interpreter_of(environment: Environment, root: Path) -> Path:
    """The interpreter of the installed environment.

    Raises:
        PeerError: something could not be installed.
    """
    folder = root / "envs" / environment.name
    interpreter = folder / "bin" / "python"
    wanted = json.dumps({**asdict(environment), "python": sys.version}, sort_keys=True)
    stamp = folder / _STAMP
    if stamp.is_file():
        if stamp.read_text() == wanted:
            return interpreter
        shutil.rmtree(folder)
    log = root / "logs" / f"install-{environment.name}.log"
    run((_base_interpreter(), "-m", "venv", str(folder)), log)
    pip = (str(interpreter), "-m", "pip", "install", "--progress-bar", "off", "--no-input")
    # without this project's folder on the path: pip would count it as installed there
    run((*pip, *environment.requirements), log, {**environment.variables, "PYTHONPATH": ""})
    stamp.write_text(wanted)
    return interpreter


def _base_interpreter() -> str:
    """The interpreter that this one's own environment was made with."""
    return str(Path(sys.base_prefix) / "bin" / "python3")
