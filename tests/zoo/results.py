"""The committed results: ``results.json`` beside this file, and the table that is made of it, ``docs/zoo.md``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from tests.zoo.row import Result

RESULTS = Path(__file__).with_name("results.json")
TABLE = Path(__file__).parents[2] / "docs" / "zoo.md"


def read(path: Path = RESULTS) -> dict[str, Result]:
    """Results by the key of their row."""
    return {key: _result(values) for key, values in json.loads(path.read_text(encoding="utf-8")).items()}


def write(results: Mapping[str, Result], path: Path = RESULTS) -> None:
    """Write results, one line each, so that a change shows as the line of its row."""
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(asdict(result))}" for key, result in results.items())
    path.write_text("{\n" + lines + "\n}\n", encoding="utf-8")


def _result(values: dict[str, object]) -> Result:
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return Result(**{**values, **lists})  # type: ignore[arg-type]
