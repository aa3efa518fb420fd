"""JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import JsonValue

from runners.errors import UserError


def read_json(path: Path) -> JsonValue:
    """Read a JSON file.

    Raises:
        UserError: it cannot be read, or is no JSON.
    """
    try:
        value: JsonValue = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not readable as JSON ({error}); fetch the model again") from error
    return value


def read_object(path: Path) -> dict[str, JsonValue]:
    """Read a JSON file that holds an object.

    Raises:
        UserError: it cannot be read, or holds something else.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(value).__name__}; fetch the model again")
    return value
