"""The pooling of a sentence-embedding model, from the files that sentence-transformers puts beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from pipeline.json_files import read_json, read_object
from runners.errors import UserError
from runners.preprocessing import Pooling

MODULES = "modules.json"
POOLING_FOLDER = "1_Pooling"  # where sentence-transformers puts it, when modules.json does not say
SUPPORTED = "Transformer, then Pooling (mean, cls or max), then Normalize or nothing"

# Older files have one switch a mode; newer ones ``pooling_mode``.
SWITCHES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


def read_pooling(folder: Path) -> Pooling:
    """The pooling that a model folder asks for.

    ``modules.json`` names the modules and the folder of the pooling's own ``config.json``; without it,
    ``1_Pooling/config.json`` is read. A folder with neither gets the mean without normalisation, which is what
    sentence-transformers makes of a plain encoder.

    Raises:
        UserError: a file cannot be read, or asks for a module or a mode that is not supported.
    """
    if (folder / MODULES).is_file():
        return _from_modules(folder)
    config = folder / POOLING_FOLDER / "config.json"
    return Pooling(mode=_mode(config) if config.is_file() else "mean", normalize=False)


def _from_modules(folder: Path) -> Pooling:
    path = folder / MODULES
    modules = read_json(path)
    if not isinstance(modules, list):
        raise UserError(f"{path}: expected a list of modules, found {type(modules).__name__}; fetch the model again")
    kinds = [_text(path, module, "type").rsplit(".", 1)[-1] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UserError(f"{path}: the modules {', '.join(kinds) or '(none)'} are not supported; supported: {SUPPORTED}")
    config = folder / _text(path, modules[1], "path") / "config.json"
    if not config.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"{path}: 'path' of the pooling leads out of the model's folder; expected a folder in it")
    return Pooling(mode=_mode(config), normalize="Normalize" in kinds)


def _text(path: Path, module: JsonValue, key: str) -> str:
    value = module.get(key) if isinstance(module, dict) else None
    if not isinstance(value, str):
        raise UserError(f"{path}: expected modules with '{key}' as text, found {module!r}; fetch the model again")
    return value


def _mode(path: Path) -> Literal["mean", "cls", "max"]:
    config = read_object(path)
    given = config.get("pooling_mode")
    if given is None:
        # no switch at all means the mean there
        given = [mode for switch, mode in SWITCHES.items() if config.get(switch)] or "mean"
    modes = given if isinstance(given, list) else [given]
    match modes:
        case ["mean"]:
            return "mean"
        case ["cls"]:
            return "cls"
        case ["max"]:
            return "max"
    named = " + ".join(str(mode) for mode in modes)
    raise UserError(f"{path}: 'pooling_mode' {named} is not supported; supported is one of mean, cls, max")
