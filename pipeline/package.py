"""Stage: write the package directory, whole or not at all."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from pipeline.artifacts import Emitted, LoadedTokenizer
from pipeline.build_lock import only_build_of
from runners.errors import UserError
from runners.goldens import Goldens
from runners.goldens import save as save_goldens
from runners.manifest import (
    CHAT_TEMPLATE_NAME,
    GOLDENS_NAME,
    MANIFEST_NAME,
    PROGRAM_NAME,
    TOKENIZER_NAME,
    FileEntry,
    Manifest,
    sealed,
    to_json,
)
from runners.package import sha256_of


@contextmanager
def staging(target: Path, marker: str = MANIFEST_NAME) -> Iterator[Path]:
    """Give a directory beside ``target`` that disappears when the block ends, unless :func:`publish` moved it.

    What a killed build left behind is cleared first; a package that it had set aside is put back.

    Args:
        target: the directory that :func:`publish` will write or replace.
        marker: a file that it has if an earlier build wrote it.

    Raises:
        UserError: ``target`` exists and no build wrote it, another build is writing it, or its folder cannot be
            written.
    """
    if target.exists() and not (target / marker).is_file():
        raise UserError(
            f"package: {target} exists and is not of a build (it has no {marker}); move it away, or set "
            "package.directory or name."
        )
    with ExitStack() as stack:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(only_build_of(target))
            _recover(target)
            directory = Path(tempfile.mkdtemp(prefix=f".{target.name}.new-{os.getpid()}-", dir=target.parent))
        except OSError as error:
            raise UserError(f"package.directory: cannot write to {target.parent} ({error.strerror}).") from error
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        directory.chmod(0o755)
        yield directory


def write_content(directory: Path, emitted: Emitted, tokenizer: LoadedTokenizer | None) -> None:
    """Write what it takes to run the package: every file but the manifest and those of the check."""
    if emitted.program != directory / PROGRAM_NAME:
        shutil.copyfile(emitted.program, directory / PROGRAM_NAME)
    if tokenizer is None:
        return
    (directory / TOKENIZER_NAME).write_text(tokenizer.tokenizer_json, encoding="utf-8")
    if tokenizer.chat_template is not None:
        (directory / CHAT_TEMPLATE_NAME).write_text(tokenizer.chat_template, encoding="utf-8")


def write_goldens(directory: Path, goldens: Goldens) -> None:
    """Add to the package what eager PyTorch said."""
    save_goldens(goldens, directory / GOLDENS_NAME)
    (directory / GOLDENS_NAME).chmod(0o644)  # safetensors writes for the owner's eyes only


def write_manifest(directory: Path, manifest: Manifest) -> Manifest:
    """Seal the manifest over the directory's present files and write it; return it as written."""
    files = {
        path.relative_to(directory).as_posix(): FileEntry(sha256=sha256_of(path), size=path.stat().st_size)
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != MANIFEST_NAME
    }
    final = sealed(manifest.model_copy(update={"files": files}))
    (directory / MANIFEST_NAME).write_text(to_json(final), encoding="utf-8")
    return final


def publish(directory: Path, target: Path) -> None:
    """Give the finished directory its name. A package of that name is replaced, whole until the last moment."""
    aside = target.with_name(f".{target.name}.old-{os.getpid()}")
    if target.exists():
        target.rename(aside)
    try:
        directory.rename(target)
    except BaseException:  # a signal too: it can come between the two
        if aside.exists() and not target.exists():
            aside.rename(target)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _recover(target: Path) -> None:
    """Put back what a dead build had set aside, and clear what it had begun. A build that still runs is left alone."""
    for left in target.parent.glob(f".{target.name}.*"):
        found = re.fullmatch(r"\.(?P<kind>new|old)-(?P<pid>\d+)(-\w+)?", left.name.removeprefix(f".{target.name}"))
        if found is None or psutil.pid_exists(int(found["pid"])):
            continue
        if found["kind"] == "old" and not target.exists():
            left.rename(target)
        else:
            shutil.rmtree(left, ignore_errors=True)
