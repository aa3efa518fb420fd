"""YAML with positions: plain values beside the place each one was written at, and the merge of two such documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from runners.errors import UserError

Keys = tuple[str | int, ...]


@dataclass(frozen=True)
class Origin:
    """Where a value was written."""

    label: str  # "configs/a.yaml:12" or "--set quantize.linear"
    folder: Path  # what relative paths in the value are relative to
    keys: Keys | None = None  # of an override, whose label names the key already

    def describe(self, keys: Keys) -> str:
        """The place and the key, for the beginning of an error message."""
        if not keys or keys == self.keys:
            return self.label
        return f"{self.label}: {dotted(keys)}"


@dataclass(frozen=True)
class Document:
    """A mapping of plain values, and the origin of every value in it (the empty path is the document itself)."""

    value: dict[str, JsonValue]
    origins: dict[Keys, Origin]

    def origin(self, keys: Keys) -> Origin:
        """Where ``keys`` was written; for a key that is missing, where its section was."""
        while keys not in self.origins:
            keys = keys[:-1]
        return self.origins[keys]


def dotted(keys: Keys) -> str:
    """``quantize.linear``, ``check.prompts[2]``."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return text.removeprefix(".")


def parse_file(path: Path) -> Document:
    """Read one YAML file.

    Raises:
        UserError: the file is missing, not a file, not UTF-8, not valid YAML, empty, or not a mapping.
    """
    value = parse(_text(path), str(path))
    if value is None:
        raise UserError(
            f"{path}: the file is empty; a configuration is a mapping that begins with 'name:' and 'model:'"
        )
    if not isinstance(value, CommentedMap):
        raise UserError(f"{path}:1: expected a mapping of sections (key: value), got {kind_of(value)}")
    origins: dict[Keys, Origin] = {(): Origin(f"{path}:1", path.parent)}
    plain = _mapping(value, (), path, 1, origins)
    return Document(plain, origins)


def parse(text: str, label: str) -> object:
    """The value of a YAML text, with ruamel's positions on its collections.

    Raises:
        UserError: the text is not valid YAML; ``label`` says where it came from.
    """
    try:
        return YAML(typ="rt", pure=True).load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{label}:{mark.line + 1}:{mark.column + 1}" if mark else label
        raise UserError(f"{place}: not valid YAML: {_problem(error)}") from error
    except YAMLError as error:
        raise UserError(f"{label}: not valid YAML: {str(error).splitlines()[0]}") from error
    except RecursionError as error:
        raise UserError(f"{label}: not valid YAML: nested too deeply") from error


def merge(base: Document, over: Document) -> Document:
    """``over`` laid on ``base``: mappings are merged key by key, everything else (lists too) is replaced."""
    origins = dict(base.origins)
    value = _merge(base.value, over.value, (), origins, over.origins)
    _move((), origins, over.origins)
    return Document(value, origins)


def kind_of(value: object) -> str:
    """A value's type in words that someone who writes YAML knows, with the value where it is short."""
    match value:
        case None:
            return "nothing (null)"
        case bool():
            return f"the flag {str(value).lower()}"
        case int() | float():
            return f"the number {value}"
        case str():
            return f"the text {value[:80]!r}"
        case Mapping():
            return "a mapping"
        case Sequence():
            return "a list"
        case _:
            return f"a {type(value).__name__}"


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; a build needs the path of a YAML configuration") from error
    except IsADirectoryError as error:
        raise UserError(f"{path}: is a directory; expected a YAML file in it, as {path}/<name>.yaml") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: is not UTF-8 text (byte {error.start}); a configuration is a YAML text file"
        ) from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error


def _problem(error: MarkedYAMLError) -> str:
    problem = str(error.problem or error.context or "unreadable").splitlines()[0]
    if "\\t" in problem:
        return f"{problem}; indent with spaces, not tabs"
    if "duplicate key" in problem:
        return f"{problem}; write each key once"
    return problem


def _mapping(
    node: CommentedMap, keys: Keys, path: Path, line: int, origins: dict[Keys, Origin]
) -> dict[str, JsonValue]:
    plain: dict[str, JsonValue] = {}
    for key, child in node.items():
        # keys that a merge (<<) brought in have no position of their own
        at = node.lc.data[key][0] + 1 if node.lc.data and key in node.lc.data else line
        if not isinstance(key, str):
            raise UserError(f"{path}:{at}: a key must be text, got {kind_of(key)}; write it in quotes if it is meant")
        plain[key] = plain_value(child, (*keys, key), path, at, origins)
    return plain


def plain_value(node: object, keys: Keys, path: Path, line: int, origins: dict[Keys, Origin]) -> JsonValue:
    """``node`` without ruamel's types; records the origin of it and of everything in it."""
    origins[keys] = Origin(f"{path}:{line}", path.parent)
    match node:
        case CommentedMap():
            return _mapping(node, keys, path, line, origins)
        case CommentedSeq():
            lines = [position[0] + 1 for position in (node.lc.item(i) for i in range(len(node)))]
            return [plain_value(child, (*keys, i), path, lines[i], origins) for i, child in enumerate(node)]
        case None | bool():
            return node
        case int():
            return int(node)
        case float():
            return float(node)
        case str():
            return str(node)
        case _:
            raise UserError(
                f"{path}:{line}: {dotted(keys)}: expected plain YAML, got {_written(node)}; put it in quotes"
            )


def _written(node: object) -> str:
    tag = getattr(node, "tag", None)
    return f"the tag {tag.value}" if tag is not None else f"a {type(node).__name__}"


def _merge(
    base: dict[str, JsonValue],
    over: dict[str, JsonValue],
    keys: Keys,
    origins: dict[Keys, Origin],
    over_origins: dict[Keys, Origin],
) -> dict[str, JsonValue]:
    merged = dict(base)
    for key, value in over.items():
        here = (*keys, key)
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            _move(here, origins, over_origins)
            merged[key] = _merge(old, value, here, origins, over_origins)
        else:
            for gone in list(_under(here, origins)):
                del origins[gone]
            origins.update({path: over_origins[path] for path in _under(here, over_origins)})
            merged[key] = value
    return merged


def _move(keys: Keys, origins: dict[Keys, Origin], over_origins: dict[Keys, Origin]) -> None:
    """Let a section begin where the overlaying file writes it; an override writes one key, and no section."""
    if over_origins[keys].keys is None:
        origins[keys] = over_origins[keys]


def _under(keys: Keys, origins: dict[Keys, Origin]) -> Iterator[Keys]:
    return (path for path in origins if path[: len(keys)] == keys)
