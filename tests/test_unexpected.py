"""What no stage foresaw ends in one message that names the stage, the model and the cause; the package before stays."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline import build as build_module
from pipeline.cli import app
from pipeline.config import BuildSettings
from pipeline.tasks import TASKS, Task
from pipeline.tasks.settings import DECODER, refuse_idle
from pipeline.unexpected import _TRY, explained, first_line, hints_of
from runners.cli import TRACEBACK_VARIABLE, run_app
from runners.errors import CheckFailedError, UserError

CONFIG = """\
name: toy
model: {{source: {source}}}
cache: {{max_length: 32}}
check: {{prompts: [hello], chat: false, steps: 2}}
package: {{directory: {folder}/dist}}
"""
OF_THE_TASK = ("register", "draft", "record")


class StrangeError(Exception):
    """As no library raises it."""


def fail(*arguments: object) -> object:
    raise StrangeError("a shape does not fit.\nand so on, for pages")


def fails_in(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if stage in OF_THE_TASK:
        changed: object = replace(TASKS["text-generation"], **{stage: fail})
        monkeypatch.setitem(TASKS, "text-generation", changed)  # type: ignore[arg-type]
    else:
        monkeypatch.setattr(build_module, stage, fail)


@pytest.fixture
def command(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command line that builds; its stage cache is of this test alone."""
    config = tmp_path / "toy.yaml"
    config.write_text(CONFIG.format(source=tiny_llama, folder=tmp_path))
    monkeypatch.setenv("PTELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(TRACEBACK_VARIABLE, "")
    return ["build", str(config)]


def error_of(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", ["pteline", *arguments])
    with pytest.raises(SystemExit) as stop:
        run_app(app)
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, ""), err
    return err


@pytest.mark.export
@pytest.mark.parametrize("stage", ["load", "quantize", "register", "export", "lower", "emit", "draft", "record"])
def test_every_stage_says_where_it_stopped_and_why(
    stage: str, command: list[str], tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    fails_in(stage, monkeypatch)
    error = error_of(command, monkeypatch, capsys)
    model = tiny_llama if stage == "load" else "LlamaForCausalLM"
    cause = f"error: model: {model} stops in the stage '{stage}' with StrangeError: a shape does not fit. To try: "
    assert cause in error
    assert "--traceback" in error
    assert "Traceback" not in error
    assert "pages" not in error
    assert list((tmp_path / "dist").iterdir()) == []


def test_the_traceback_shows_the_cause_whole(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fails_in("load", monkeypatch)
    error = error_of(["--traceback", *command], monkeypatch, capsys)
    assert "in fail\n" in error
    assert "StrangeError: a shape does not fit.\nand so on, for pages" in error


@pytest.mark.parametrize(
    "error",
    [UserError("model: known"), CheckFailedError("known"), OSError(28, "No space left on device"), KeyboardInterrupt()],
    ids=lambda error: type(error).__name__,
)
def test_what_says_enough_by_itself_is_passed_on(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, explained("lower", lambda: "Model", lambda: DECODER):
        raise error
    assert raised.value is error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("\n  one.\ntwo"), "one"),
        (AssertionError(), "AssertionError"),
        (OSError("no file named config.json"), "no file named config.json"),
    ],
)
def test_the_first_line_of_a_cause_is_said(error: Exception, said: str) -> None:
    assert first_line(error) == said
    message = f"{type(error).__name__}: {said}\\. To try: .*max_prefill_length: 1"
    with pytest.raises(UserError, match=message), explained("export", lambda: "Model", lambda: DECODER):
        raise error


# A value of each key of a hint that is no default.
GIVEN: dict[str, object] = {
    "cache.max_length": 32,
    "export.attention": "portable",
    "export.max_prefill_length": 1,
    "export.methods": ["forward"],
    "quantize.embedding": "8w",
    "quantize.linear": "8da4w",
    "quantize.lm_head": "8da8w",
}


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())
@pytest.mark.parametrize("stage", _TRY)
def test_no_task_is_told_to_set_what_it_refuses(task: Task, stage: str) -> None:
    hints = hints_of(stage, task.settings)
    for key in [key for key, hint in _TRY[stage] if key is not None and hint in hints]:
        section, name = key.split(".")
        settings = {"name": "a", "model": {"source": "./a"}, section: {name: GIVEN[key]}}
        refuse_idle(BuildSettings.model_validate(settings), task.name, task.settings)


@pytest.mark.parametrize(
    ("task", "told"),
    [
        (
            "text-generation",
            "To try: export.max_prefill_length: 1 .*; export.attention: portable; quantize.linear: none",
        ),
        ("text2text", "To try: export.max_prefill_length: 1 [^;]*; quantize.linear: none"),
        ("image-classification", "To try: quantize.linear: none"),
    ],
)
def test_a_task_is_told_what_it_reads(task: str, told: str) -> None:
    message = f"with StrangeError: a shape does not fit\\. {told}\\. 'pteline --traceback"
    with pytest.raises(UserError, match=message), explained("lower", lambda: "Model", lambda: TASKS[task].settings):
        fail()


def test_where_there_is_nothing_to_try_nothing_is_said() -> None:
    settings = TASKS["image-classification"].settings
    with pytest.raises(UserError) as raised, explained("emit", lambda: "Model", lambda: settings):
        fail()
    assert "To try" not in str(raised.value)
