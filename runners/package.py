"""Open a package: read its manifest and verify every file before anything is loaded."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from runners.errors import UserError
from runners.manifest import GOLDENS_NAME, MANIFEST_NAME, PROGRAM_NAME, FileEntry, Manifest, read_manifest

_BLOCK = 1 << 20  # bytes hashed at a time


@dataclass(frozen=True)
class Package:
    """A package whose manifest was verified. Its files are immutable by agreement: rebuild, do not edit."""

    path: Path
    manifest: Manifest

    @property
    def program_path(self) -> Path:
        """The ExecuTorch program."""
        return self.path / PROGRAM_NAME

    @property
    def tokenizer_path(self) -> Path | None:
        """The tokenizer file; None for a package without one."""
        entry = self.manifest.tokenizer
        return None if entry is None else self.path / entry.file

    @property
    def chat_template_path(self) -> Path | None:
        """The chat template; None for a package without one."""
        entry = self.manifest.tokenizer
        return None if entry is None or entry.chat_template is None else self.path / entry.chat_template

    @property
    def goldens_path(self) -> Path | None:
        """The goldens; None for a package without them."""
        return self.path / GOLDENS_NAME if GOLDENS_NAME in self.manifest.files else None


def open_package(path: Path, *, verify: bool = True) -> Package:
    """Open the package in the directory ``path``.

    Args:
        path: the directory that holds ``manifest.json``.
        verify: compare the sha256 of every file with the manifest (reads them all). Sizes are always compared.

    Raises:
        UserError: ``path`` is no package, its manifest is invalid or edited, or a file is missing or differs.
    """
    _require_package(path)
    package = Package(path, read_manifest(path / MANIFEST_NAME))
    _require_listed(package)
    for name, entry in package.manifest.files.items():
        _verify_file(package.path, name, entry, hashed=verify)
    return package


def _require_package(path: Path) -> None:
    wanted = f"expected a package: a directory with {MANIFEST_NAME}, as 'pteline build' writes it"
    if not path.exists():
        raise UserError(f"{path}: no such directory; {wanted}.")
    if path.is_file():
        near = f" Give the directory {path.resolve().parent}." if (path.parent / MANIFEST_NAME).is_file() else ""
        raise UserError(f"{path} is a file; {wanted}.{near}")
    if not (path / MANIFEST_NAME).is_file():
        inside = sorted(str(found.parent) for found in path.glob(f"*/{MANIFEST_NAME}"))
        near = f" Packages inside it: {', '.join(inside)}." if inside else ""
        raise UserError(f"{path} has no {MANIFEST_NAME}; {wanted}.{near}")


def _require_listed(package: Package) -> None:
    """Every file that a runner opens by name must be one whose digest is known."""
    named = [package.program_path, package.tokenizer_path, package.chat_template_path]
    for file in named:
        if file is not None and file.name not in package.manifest.files:
            raise UserError(f"{package.path}: the manifest lists no digest for {file.name}. Build the package again.")


def _verify_file(directory: Path, name: str, entry: FileEntry, *, hashed: bool) -> None:
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts:
        raise UserError(f"{directory}: the manifest lists '{name}', which lies outside the package. Do not use it.")
    file = directory / relative
    again = "Build or fetch the package again."
    if not file.is_file():
        raise UserError(f"{file}: missing, though the manifest lists it. {again}")
    size = file.stat().st_size
    if size != entry.size:
        raise UserError(f"{file}: has {size} bytes, the manifest says {entry.size}: truncated or changed. {again}")
    if hashed and (digest := sha256_of(file)) != entry.sha256:
        raise UserError(f"{file}: sha256 is {digest}, the manifest says {entry.sha256}: changed. {again}")


def sha256_of(file: Path) -> str:
    """The sha256 of a file's content, in hexadecimal."""
    state = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            state.update(block)
    return state.hexdigest()
