"""A local folder as transformers saves it: config.json, safetensors, tokenizer files."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import metadata_load
from pydantic import JsonValue
from safetensors import SafetensorError, safe_open

from pipeline.sources.fetched import Fetched, folder_digest
from runners.errors import UserError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
MODEL_FILES = ("*.safetensors", "*.json", "*.model", "*.jinja", "vocab.txt", "merges.txt", "tokenizer.*")
PICKLE_FILES = ("*.bin", "*.pt", "*.pth")
CODE_FILES = ("*.py",)
TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt", "merges.txt", "tokenizer_config.json")


def fetch(folder: Path, *, allow_pickle: bool, trust_remote_code: bool, revision: str | None = None) -> Fetched:
    """Check the folder. Weights may be absent (a config alone makes a random model); what is there must be whole.

    Raises:
        UserError: no such folder, no config.json, a damaged file, or code or pickles that are not allowed.
    """
    if not folder.is_dir():
        what = "is a file; expected a folder or a .gguf file" if folder.exists() else "does not exist"
        raise UserError(f"model.source: {folder} {what}")
    if not (folder / CONFIG).is_file():
        raise UserError(
            f"model.source: {folder} has no {CONFIG}; expected a folder as transformers' save_pretrained writes"
        )
    _refuse_code(folder, trust_remote_code)
    _refuse_pickles(folder, allow_pickle)
    _check_weights(folder)
    files = matching(folder, patterns(allow_pickle=allow_pickle, trust_remote_code=trust_remote_code))
    has_tokenizer = bool(matching(folder, TOKENIZER_FILES))
    return Fetched(folder, "folder", folder_digest(files, folder), revision, _licence(folder), has_tokenizer)


def patterns(*, allow_pickle: bool, trust_remote_code: bool) -> tuple[str, ...]:
    """Names of the files that matter: what is downloaded, and what the digest covers."""
    return MODEL_FILES + (PICKLE_FILES if allow_pickle else ()) + (CODE_FILES if trust_remote_code else ())


def matching(folder: Path, names: tuple[str, ...]) -> list[Path]:
    """The files directly in ``folder`` whose name matches one of the patterns, sorted."""
    return sorted(file for file in folder.iterdir() if file.is_file() and any(fnmatch(file.name, n) for n in names))


def read_json(path: Path) -> dict[str, JsonValue]:
    """A JSON file that holds an object.

    Raises:
        UserError: it does not.
    """
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _refuse_code(folder: Path, trusted: bool) -> None:
    for name in (CONFIG, "tokenizer_config.json"):
        path = folder / name
        if path.is_file() and "auto_map" in read_json(path) and not trusted:
            raise UserError(
                f"{path}: the key 'auto_map' asks for Python code that comes with the model; it is not run unless "
                "model.trust_remote_code is true: read that code before you set it"
            )


def _refuse_pickles(folder: Path, allowed: bool) -> None:
    pickles = matching(folder, PICKLE_FILES)
    if pickles and not allowed and not matching(folder, ("*.safetensors",)):
        raise UserError(
            f"{pickles[0]}: the only weights here are pickled, and loading a pickle can run any code; convert them to "
            "safetensors, or set model.allow_pickle: true if you trust whoever made them"
        )


def _check_weights(folder: Path) -> None:
    """Open each safetensors file: its header must fit its length, and no shard of the index may be missing."""
    for path in matching(folder, ("*.safetensors",)):
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            raise UserError(f"{path}: truncated or damaged safetensors file ({error}); fetch it again") from error
    index = folder / INDEX
    weight_map = read_json(index).get("weight_map") if index.is_file() else {}
    if not isinstance(weight_map, dict):
        raise UserError(f"{index}: expected an object 'weight_map' (tensor name: file)")
    missing = sorted({str(name) for name in weight_map.values() if not (folder / str(name)).is_file()})
    if missing:
        raise UserError(f"{index}: names files that are not there: {', '.join(missing)}; fetch the model again")


def _licence(folder: Path) -> str | None:
    """The licence that the model card's header states."""
    card = folder / "README.md"
    if not card.is_file():
        return None
    try:
        licence = (metadata_load(card) or {}).get("license")
    # a card is prose by strangers: one without a readable header has no licence to state
    except Exception:
        return None
    return str(licence) if licence else None
