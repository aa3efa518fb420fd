"""Read a configuration: YAML, ``extends``, ``--set`` overrides, validation. A mistake is one error with its place."""

from __future__ import annotations

import os.path
from collections.abc import Sequence
from pathlib import Path

from pydantic import JsonValue, ValidationError

from pipeline.config import BuildSettings
from pipeline.config_checks import problems
from pipeline.config_errors import explain
from pipeline.config_yaml import Document, Keys, Origin, kind_of, merge, parse, parse_file, plain_value
from pipeline.sources.kinds import is_local
from runners.errors import UserError

EXTENDS = "extends"
SOURCE: Keys = ("model", "source")
FILES: tuple[Keys, ...] = (("check", "images"), ("check", "audio"))
TEXTS: tuple[Keys, ...] = (("check", "perplexity", "text"), ("quantize", "calibration", "text"))


def read(path: Path, overrides: Sequence[str] = ()) -> BuildSettings:
    """The settings in ``path``, with what it extends and with ``overrides`` (``"quantize.linear=none"``) applied.

    Relative paths in it are resolved against the file that wrote them.

    Raises:
        UserError: a file cannot be read, or a setting is unknown, of the wrong type, out of range or impossible beside
            another one. The message has one line a problem: file and line, key, what is accepted, the nearest match.
    """
    return settings_of(read_document(path, overrides))


def read_document(path: Path, overrides: Sequence[str] = ()) -> Document:
    """The values in ``path``, with what it extends and with ``overrides`` applied, and where each was written.

    Raises:
        UserError: a file cannot be read, or is no mapping of sections.
    """
    document = _with_bases(path, ())
    for override in overrides:
        document = merge(document, _override(override))
    _resolve_paths(document)
    return document


def settings_of(document: Document) -> BuildSettings:
    """The settings that ``document`` holds.

    Raises:
        UserError: see :func:`read`.
    """
    try:
        settings = BuildSettings.model_validate(document.value)
    except ValidationError as error:
        raise UserError("\n".join(explain(error, document))) from error
    found = [
        f"{document.origin(problem.keys).describe(problem.keys)}: {problem.text}" for problem in problems(settings)
    ]
    if found:
        raise UserError("\n".join(found))
    return settings


def resolved(settings: BuildSettings) -> dict[str, JsonValue]:
    """Every setting as JSON, defaults included: the configuration as built, for the manifest."""
    plain: dict[str, JsonValue] = settings.model_dump(mode="json")
    return plain


def json_schema() -> dict[str, JsonValue]:
    """JSON Schema (2020-12) of a configuration file, for editors.

    Nothing is required in it: any key may come from the file that is extended.
    """
    schema: dict[str, JsonValue] = BuildSettings.model_json_schema()
    definitions = schema["$defs"]
    assert isinstance(definitions, dict)
    for part in (schema, *definitions.values()):
        assert isinstance(part, dict)
        part.pop("required", None)
    properties = schema["properties"]
    assert isinstance(properties, dict)
    described: JsonValue = {
        "type": "string",
        "title": "Extends",
        "description": "Another YAML file, relative to this one, whose settings this file starts from. "
        "Sections are merged key by key; lists are replaced.",
    }
    schema["properties"] = {EXTENDS: described, **properties}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "pteline build"}


def _with_bases(path: Path, chain: tuple[Path, ...]) -> Document:
    real = path.resolve()
    if real in chain:
        names = " -> ".join(file.name for file in (*chain[chain.index(real) :], real))
        raise UserError(f"{path}: extends itself: {names}; remove one of these '{EXTENDS}' keys")
    document = parse_file(path)
    if EXTENDS not in document.value:
        return document
    origin = document.origins.pop((EXTENDS,))
    base = document.value.pop(EXTENDS)
    if not isinstance(base, str) or not base:
        raise UserError(f"{origin.label}: {EXTENDS}: expected the path of one YAML file, got {kind_of(base)}")
    base_path = Path(os.path.normpath(origin.folder / base))
    if not base_path.is_file():
        raise UserError(f"{origin.label}: {EXTENDS}: no such file: {base_path}; the path is relative to {path.name}")
    return merge(_with_bases(base_path, (*chain, real)), document)


def _override(text: str) -> Document:
    name, equals, value = text.partition("=")
    keys = tuple(name.strip().split("."))
    if not equals or not all(keys):
        raise UserError(f"--set {text}: expected KEY=VALUE with a dotted key, as --set quantize.linear=none")
    if keys[0] == EXTENDS:
        raise UserError(f"--set {text}: '{EXTENDS}' belongs in the file; build a file that extends the other one")
    label = f"--set {name.strip()}"
    found: dict[Keys, Origin] = {}
    plain = plain_value(parse(value, label), keys, Path("--set"), 1, found)
    origin = Origin(label, Path(), keys)
    for key in reversed(keys[1:]):
        plain = {key: plain}
    sections = {keys[:depth] for depth in range(len(keys) + 1)}
    return Document({keys[0]: plain}, dict.fromkeys(sections | set(found), origin))


def _resolve_paths(document: Document) -> None:
    """Write local paths anew, relative to the working directory: absolute ones would tie a manifest to a machine."""
    source = _get(document.value, SOURCE)
    if isinstance(source, str) and is_local(source):
        _section(document.value, SOURCE)["source"] = local_path(source, document.origin(SOURCE).folder)
    for keys in TEXTS:
        text = _get(document.value, keys)
        if isinstance(text, str):
            path = document.origin(keys).folder / Path(text).expanduser()
            _section(document.value, keys)["text"] = os.path.normpath(path)
    for keys in FILES:
        paths = _get(document.value, keys)
        if isinstance(paths, list):
            folder = document.origin(keys).folder
            found = [os.path.normpath(folder / Path(x).expanduser()) if isinstance(x, str) else x for x in paths]
            _section(document.value, keys)[str(keys[-1])] = found


def local_path(source: str, folder: Path) -> str:
    """``source`` against ``folder``, still recognisable as a local path: it begins with ./, ../ or /."""
    path = os.path.normpath(folder / Path(source).expanduser())
    return path if path.startswith(("/", "../")) or path == ".." else f"./{path}"


def _get(value: dict[str, JsonValue], keys: Keys) -> JsonValue:
    found: JsonValue = value
    for key in keys:
        found = found.get(str(key)) if isinstance(found, dict) else None
    return found


def _section(value: dict[str, JsonValue], keys: Keys) -> dict[str, JsonValue]:
    section = _get(value, keys[:-1])
    assert isinstance(section, dict)  # the caller found a value in it
    return section
