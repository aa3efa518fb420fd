"""A GGUF file: refused up front when it is none, or shorter than its own tensor table says."""

from __future__ import annotations

from pathlib import Path

import gguf

from pipeline.sources.fetched import Fetched, check_digest
from runners.errors import UserError
from runners.package import sha256_of

MAGIC = b"GGUF"


def fetch(path: Path, sha256: str | None) -> Fetched:
    """Check the file at ``path`` against ``sha256`` and against itself.

    Raises:
        UserError: missing, not GGUF, truncated, or not the pinned file.
    """
    _check_magic(path)
    digest = sha256_of(path)
    check_digest(digest, sha256, str(path))
    reader = read(path)
    licence = reader.get_field("general.license")
    has_tokenizer = reader.get_field("tokenizer.ggml.tokens") is not None
    return Fetched(path, "gguf", digest, None, str(licence.contents()) if licence else None, has_tokenizer)


def read(path: Path) -> gguf.GGUFReader:
    """Open a GGUF file; tensors stay on disk (memory-mapped).

    Raises:
        UserError: the header cannot be read, or a tensor reaches past the end of the file.
    """
    try:
        reader = gguf.GGUFReader(path)
    # damage shows as whatever numpy says of the bytes: short views, unknown types, absurd sizes
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        size = path.stat().st_size
        raise UserError(
            f"{path}: truncated or damaged GGUF file: it ends, or makes no sense, before all that its header "
            f"announces ({size:,} bytes are there); fetch it again"
        ) from error
    ends = [(tensor.data_offset + tensor.n_bytes, tensor.name) for tensor in reader.tensors]
    end, name = max(ends, default=(0, ""))
    if end > path.stat().st_size:
        raise UserError(
            f"{path}: truncated GGUF file: tensor {name!r} ends at byte {end:,}, past the end; fetch it again"
        )
    if not ends:
        raise UserError(f"{path}: the GGUF file holds no tensor; expected a model's weights")
    return reader


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except FileNotFoundError as error:
        raise UserError(f"model.source: no such file: {path}") from error
    except OSError as error:
        raise UserError(f"model.source: {path} cannot be read: {error.strerror}") from error
    if magic != MAGIC:
        raise UserError(f"{path}: not a GGUF file: it begins with {magic!r}, expected {MAGIC!r}")
