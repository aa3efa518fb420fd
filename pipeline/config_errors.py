"""Validation errors in words: the place, the key, what is accepted, what comes nearest."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pipeline.config import BuildSettings, LowerSettings
from pipeline.config_yaml import Document, Keys, kind_of
from pipeline.quantization.schemes import is_taken
from runners.errors import CheckFailedError, UserError

LINEAR_KEYS: tuple[Keys, ...] = (("quantize", "linear"), ("quantize", "lm_head"))

# What pydantic's error types mean to someone who writes YAML.
EXPECTED = {
    "string_type": "text (put it in quotes)",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "path_type": "the path of a file",
    "model_type": "a mapping of settings (leave the key out for the defaults)",
    "tuple_type": "a list",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
    "finite_number": "a finite number",
    "string_too_short": "text that is not empty",
    "string_too_long": "at most {max_length} characters",
    "too_long": "at most {max_length} entries",
}
PATTERNS = {
    r"^[0-9a-f]{64}$": "64 lower-case hexadecimal digits, as sha256sum prints them",
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$": "letters, digits, '.', '_' and '-', beginning with a letter or digit",
}


def explain(error: ValidationError, document: Document) -> Iterator[str]:
    """One line a problem: ``file.yaml:12: quantize.linaer: unknown key; did you mean 'linear'? accepted: …``."""
    for detail in error.errors():
        keys = detail["loc"]
        yield f"{document.origin(keys).describe(keys)}: {_problem(detail, keys, _backend(document))}"


@contextmanager
def located(document: Document) -> Iterator[None]:
    """Put the place of a setting before the message of an error that later stages raise about it.

    Such a message begins with the setting's key, as ``model.num_layers: 99, but …``: it gets the place in front that
    errors of the schema have.

    Raises:
        UserError: one was raised inside.
        CheckFailedError: likewise.
    """
    try:
        yield
    except UserError as error:
        raise UserError(_placed(str(error), document)) from error
    except CheckFailedError as error:
        raise CheckFailedError(_placed(str(error), document)) from error


def _placed(message: str, document: Document) -> str:
    key, colon, rest = message.partition(": ")
    keys: Keys = tuple(key.split("."))
    if not colon or not is_setting(keys):
        return message
    return f"{document.origin(keys).describe(keys)}: {rest}"


def is_setting(keys: Keys) -> bool:
    """Whether ``keys`` name a setting in one of the sections."""
    try:
        return len(keys) > 1 and keys[-1] in _keys_of(keys[:-1])
    except (KeyError, StopIteration):  # no such section; a setting that is none
        return False


def nearest(given: object, accepted: Sequence[str]) -> str:
    """``did you mean 'linear'? `` when one of ``accepted`` is near enough, else nothing."""
    close = difflib.get_close_matches(str(given), accepted, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}? " if close else ""


def _problem(detail: ErrorDetails, keys: Keys, backend: str) -> str:
    match detail["type"]:
        case "extra_forbidden":
            accepted = _keys_of(keys[:-1])
            return f"unknown key; {nearest(keys[-1], accepted)}accepted: {', '.join(accepted)}"
        case "missing":
            return _missing(keys)
        case "literal_error":
            accepted = re.findall(r"'([^']*)'", str(detail["ctx"]["expected"]))
            if keys in LINEAR_KEYS:
                accepted = [name for name in accepted if is_taken(name, backend)]
            hint = nearest(detail["input"], accepted)
            return f"{kind_of(detail['input'])} is not known; {hint}accepted: {', '.join(accepted)}"
        case "value_error":
            return str(detail["ctx"]["error"])
        case _:
            return f"expected {_expected(detail)}, got {kind_of(detail['input'])}"


def _backend(document: Document) -> str:
    """The backend that the document names; the default where it names none, or one that there is not."""
    section = document.value.get("lower")
    named = section.get("backend") if isinstance(section, dict) else None
    known = get_args(LowerSettings.model_fields["backend"].annotation)
    return str(named) if named in known else LowerSettings().backend


def _expected(detail: ErrorDetails) -> str:
    context = detail.get("ctx", {})
    if detail["type"] == "string_pattern_mismatch":
        return PATTERNS[str(context["pattern"])]
    words = EXPECTED.get(detail["type"])
    # an error type without words of its own keeps pydantic's
    return words.format(**context) if words else detail["msg"]


def _missing(keys: Keys) -> str:
    if keys == ("name",):
        return (
            "missing; a configuration without a name is a base that others extend: add 'name:', or build one of those"
        )
    return "missing; this setting has no default"


def _keys_of(keys: Keys) -> list[str]:
    """The keys that the section at ``keys`` accepts."""
    section: type[BaseModel] = BuildSettings
    for key in keys:
        section = _section_in(section.model_fields[str(key)].annotation)
    accepted = list(section.model_fields)
    return accepted if keys else ["extends", *accepted]


def _section_in(annotation: Any) -> type[BaseModel]:
    """The section class in ``annotation``, which may be optional."""
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    return next(option for option in options if isinstance(option, type) and issubclass(option, BaseModel))
