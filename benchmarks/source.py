"""The model that every peer is made of, as a file and as a folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.commands import ROOT, python, run
from benchmarks.errors import PeerError
from benchmarks.peer import Source
from pipeline.config_reader import read
from pipeline.sources import fetch
from runners.errors import UserError

CONFIG = ROOT / "configs" / "smollm2_135m.yaml"


def source_of(config: Path, root: Path) -> Source:
    """The model of a configuration.

    Raises:
        PeerError: it cannot be fetched, is no GGUF file, or cannot be written as a folder.
    """
    try:
        settings = read(config, ["name=source"]).model  # the file may be a base, which has no name
        fetched = fetch(
            settings.source,
            revision=settings.revision,
            sha256=settings.sha256,
            allow_pickle=settings.allow_pickle,
            trust_remote_code=settings.trust_remote_code,
        )
    except UserError as error:
        raise PeerError(str(error)) from error
    if fetched.kind != "gguf":
        raise PeerError(f"{config}: the source is a {fetched.kind}; expected a GGUF file, which llama.cpp reads too")
    return Source(fetched.path, _folder(config, root / "models" / f"source-{fetched.digest[:16]}", root))


def _folder(config: Path, folder: Path, root: Path) -> Path:
    """The folder, whole or not at all."""
    if folder.is_dir():
        return folder
    unfinished = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    run(python("benchmarks.makers.folder", str(config), str(unfinished)), root / "logs" / "make-source.log")
    unfinished.rename(folder)
    return folder
