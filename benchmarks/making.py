"""Models that peers make once: kept with what they cost, whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from benchmarks.commands import run
from benchmarks.peer import Workspace
from benchmarks.records import BuildCost

_COST = "cost.json"


def made(workspace: Workspace, name: str, command: Callable[[Path], tuple[str, ...]]) -> tuple[Path, BuildCost]:
    """The directory of the model ``name``; where it is not there, ``command`` makes it in the directory it is given.

    Raises:
        PeerError: the command fails.
    """
    folder = workspace.model(name)
    cost = folder / _COST
    if cost.is_file():
        return folder, BuildCost.model_validate_json(cost.read_text())
    unfinished = folder.with_name(f"{folder.name}.new")
    for old in (unfinished, folder):
        shutil.rmtree(old, ignore_errors=True)
    unfinished.mkdir(parents=True)
    workspace.progress(f"making {name}")
    spent = run(command(unfinished), workspace.log(f"make-{name}"))
    (unfinished / _COST).write_text(spent.model_dump_json())
    unfinished.rename(folder)
    return folder, spent


def is_made(workspace: Workspace, name: str) -> bool:
    """Whether the model is there."""
    return (workspace.model(name) / _COST).is_file()
