"""A local folder as transformers saves it: config.json, safetensors, tokenizer files."""

from __future__ import annotations

import json
import warnings
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import metadata_load
from pydantic import JsonValue
from safetensors import SafetensorError, safe_open

from pipeline.sources.fetched import Fetched, folder_digest
from runners.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
INDEX = "model.safetensors.index.json"
MODEL_FILES = ("*.safetensors", "*.json", "*.model", "*.jinja", "vocab.txt", "merges.txt", "tokenizer.*")
PICKLE_FILES = ("*.bin", "*.pt", "*.pth")
CODE_FILES = ("*.py",)
TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt", "merges.txt", TOKENIZER_CONFIG)


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
    return Fetched(folder, "folder", folder_digest(files, folder), revision, _licence(folder), _has_tokenizer(folder))


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
    for name in (CONFIG, TOKENIZER_CONFIG):
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


def _has_tokenizer(folder: Path) -> bool:
    names = {path.name for path in matching(folder, TOKENIZER_FILES)}
    if names - {"vocab.txt", TOKENIZER_CONFIG} or "vocab.txt" not in names:
        return bool(names)
    reader = _tokenizer_class(folder)
    if reader is None or "vocab.txt" in reader.vocab_files_names.values():
        return True
    # transformers would make an empty tokenizer of it, and every word of a prompt an unknown one
    warnings.warn(
        f"{folder}/vocab.txt: transformers' {reader.__name__} reads no such file, so the model counts as one without a "
        "tokenizer; to have one, put a tokenizer.json into a local copy of the folder",
        stacklevel=3,
    )
    return False


def _tokenizer_class(folder: Path) -> type[PreTrainedTokenizerBase] | None:
    """The class that transformers would load for this folder; None where that cannot be told."""
    # heavy, and few folders come this far
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

    stated = [read_json(folder / name) for name in (TOKENIZER_CONFIG, CONFIG) if (folder / name).is_file()]
    named = next((values["tokenizer_class"] for values in stated if values.get("tokenizer_class")), None)
    name = named or TOKENIZER_MAPPING_NAMES.get(str(stated[-1].get("model_type"))) or ""
    found: type[PreTrainedTokenizerBase] | None = tokenizer_class_from_name(str(name))
    return found


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
