"""Errors that later stages raise about a setting: they name its place, as those of the schema do."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import pipeline
from pipeline.cli import app
from pipeline.config_errors import is_setting, located
from pipeline.config_reader import read_document
from runners.errors import CheckFailedError, UserError
from tests import tiny

TEXT = "name: a\nmodel:\n  source: ./m\n  num_layers: 2\ncache:\n  placement: buffer\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.yaml"
    path.write_text(TEXT)
    return path


def placed(path: Path, error: Exception, *overrides: str) -> str:
    """The message that ``error`` has outside."""
    with pytest.raises(type(error)) as caught, located(read_document(path, overrides)):
        raise error
    return str(caught.value)


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("model.num_layers: 99, but the model has 2 layers: less", 4),
        ("cache.max_length: too long", 5),  # a default: where its section is
        ("lower.max_delegates: 3", 1),  # or the file
    ],
)
@pytest.mark.parametrize("kind", [UserError, CheckFailedError])
def test_an_error_about_a_setting_has_its_place_in_front(path: Path, message: str, line: int, kind: type) -> None:
    assert placed(path, kind(message)) == f"{path}:{line}: {message}"


def test_an_override_is_a_place(path: Path) -> None:
    found = placed(path, UserError("model.num_layers: 99, but the model has 2"), "model.num_layers=99")
    assert found == "--set model.num_layers: 99, but the model has 2"


def test_a_base_is_a_place(path: Path) -> None:
    over = path.with_name("b.yaml")
    over.write_text("extends: a.yaml\nname: b\n")
    assert placed(over, UserError("model.num_layers: 99")) == f"{path}:4: model.num_layers: 99"


@pytest.mark.parametrize(
    "message",
    [
        "package: dist/a exists and is not of a build",
        "model.pte: the runtime cannot load it",
        "model.source.deep: x",
        "name.x: y",
        "/a/b.gguf: the weights cannot be loaded",
        "no key at all",
        "model.num_layers",
        "",
    ],
)
def test_any_other_message_is_left_alone(path: Path, message: str) -> None:
    assert placed(path, UserError(message)) == message


def test_another_error_goes_through(path: Path) -> None:
    assert placed(path, RuntimeError("model.num_layers: x")) == "model.num_layers: x"


def test_the_build_says_where_the_setting_is_that_does_not_fit_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PTELINE_CACHE", str(tmp_path / "cache"))
    tiny.save_llama(tmp_path / "m")
    Path("a.yaml").write_text(TEXT.replace("num_layers: 2", "num_layers: 9"))
    done = CliRunner().invoke(app, ["build", "a.yaml"])
    assert isinstance(done.exception, UserError)
    assert str(done.exception).startswith("a.yaml:4: model.num_layers: 9, but the model has 2 layers")


def raised_keys() -> list[str]:
    """The keys that messages of errors in the pipeline's sources begin with."""
    keys = []
    for file in sorted(Path(pipeline.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("UserError", "CheckFailedError"):
                texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
                found = re.match(r"([a-z_]+(?:\.[a-z_0-9]+)+): ", str(texts[0])) if texts else None
                keys += [found[1]] if found else []
    return keys


def test_every_key_that_a_message_begins_with_is_a_setting() -> None:
    keys = raised_keys()
    assert "model.num_layers" in keys
    assert "cache.max_length" in keys
    assert [key for key in keys if not is_setting(tuple(key.split(".")))] == []
