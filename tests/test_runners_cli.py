"""The command line: what goes to which stream, exit codes, and what a runner may import."""

from __future__ import annotations

import ast
import errno
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import typer
from rich.console import Console

import runners
from runners import check_command, terminal
from runners.bench_report import Memory
from runners.chat import GREETING
from runners.cli import TRACEBACK_VARIABLE, app, run_app
from runners.errors import CheckFailedError, UserError
from runners.package import open_package
from runners.sampling import greedy
from runners.session import Session
from runners.tokenizer import open_tokenizer
from tests.packages import L, Program, write_package

ROOT = Path(runners.__file__).parent


@pytest.fixture
def command(monkeypatch, capsys):
    """Run the command line in this process: (exit code, standard output, standard error)."""

    def run(*arguments: str | Path, stdin: bytes = b"", application: typer.Typer = app) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pteline", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        with pytest.raises(SystemExit) as stop:
            run_app(application)
        out, err = capsys.readouterr()
        return stop.value.code, out, err

    monkeypatch.setenv(TRACEBACK_VARIABLE, "")
    return run


@pytest.fixture
def unloadable(tmp_path) -> Path:
    """A package that opens, with a program that nothing can load: for what must be refused before that."""
    return write_package(tmp_path / "toy", Program(b"no program"))


@pytest.fixture(scope="module")
def toy(toy_program, tmp_path_factory) -> Path:
    return write_package(tmp_path_factory.mktemp("cli") / "toy", toy_program)


def application_that_raises(error: BaseException) -> typer.Typer:
    application = typer.Typer(pretty_exceptions_enable=False)

    @application.command()
    def fail() -> None:
        raise error

    return application


@pytest.mark.parametrize(
    ("error", "code"), [(UserError("a mistake"), 2), (CheckFailedError("outside"), 1), (KeyboardInterrupt(), 130)]
)
def test_errors_become_exit_codes_and_one_message(command, error, code):
    found, out, err = command(application=application_that_raises(error))
    assert (found, out) == (code, "")
    assert err == (f"error: {error}\n" if str(error) else "")


def test_output_that_nothing_takes_is_one_message(command):
    found, _, err = command(application=application_that_raises(OSError(errno.ENOSPC, "No space left on device")))
    assert found == 2
    assert err == "error: the output cannot be written (No space left on device): give it another place.\n"


def test_ctrl_c_at_the_prompt_costs_a_line_and_not_the_chat(monkeypatch):
    class Input:
        lines: ClassVar = [KeyboardInterrupt(), "hello\n", ""]

        def isatty(self) -> bool:
            return False

        def readline(self) -> str:
            line = self.lines.pop(0)
            if isinstance(line, KeyboardInterrupt):
                raise line
            return line

    monkeypatch.setattr(sys, "stdin", Input())
    assert list(terminal.lines(Console(quiet=True), None)) == ["hello\n"]


def test_another_error_is_a_fault_of_the_program():
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(sys, "argv", ["pteline"])
        run_app(application_that_raises(ZeroDivisionError()))


def test_the_traceback_is_shown_on_request(command, monkeypatch, tmp_path):
    code, _, err = command("--traceback", "run", tmp_path, "hello")
    assert (code, "Traceback" in err, "has no manifest.json" in err) == (2, True, True)
    monkeypatch.delenv(TRACEBACK_VARIABLE)  # where the option is kept, for child processes too
    code, _, err = command("run", tmp_path, "hello")
    assert (code, "Traceback" in err) == (2, False)


def test_the_traceback_variable_is_read(command, monkeypatch, tmp_path):
    monkeypatch.setenv(TRACEBACK_VARIABLE, "1")
    assert "Traceback" in command("run", tmp_path, "hello")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the prompt is empty"),
        (["  "], "the prompt is empty"),
        (["-"], "the prompt on standard input is empty"),
        (["hi", "--raw", "--system", "x"], "--system needs the chat template, which --raw leaves out"),
        (["--raw", "--interactive"], "--interactive needs the chat template, which --raw"),
        (["-", "--interactive"], "leave '-' out"),
        (["hi", "--temperature", "-1"], "--temperature is -1.0; expected 0 or more"),
        (["hi", "--top-p", "0"], "--top-p is 0.0; expected above 0"),
        (
            ["hi", "--top-p", "0.9"],
            "--top-p: no effect at --temperature 0, which always takes the likeliest token. Add a",
        ),
        (["hi", "--seed", "1", "--top-k", "3"], "--top-k, --seed: no effect at --temperature 0"),
        (["hi", "--min-p", "0.1", "--temperature", "0"], "as --temperature 0.7, or leave it out"),
        (["hi", "--top-p", "0.9", "--temperature", "0.1"], "model.pte: the runtime cannot load it"),
        (["hi", "--threads", "0"], "--threads is 0; expected 1 or more"),
        (["hi"], "model.pte: the runtime cannot load it"),
    ],
)
def test_bad_input_is_refused(command, unloadable, arguments, message):
    code, out, err = command("run", unloadable, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err


def test_a_system_message_without_a_template_is_refused(command, tmp_path):
    folder = write_package(tmp_path / "toy", Program(b"x"), chat_template=None)
    for option in (["hi", "--system", "x"], ["--interactive"]):
        code, _, err = command("run", folder, *option)
        assert (code, "has no chat template" in err) == (2, True)


def test_a_prompt_that_is_no_utf8_is_refused(command, unloadable):
    code, _, err = command("run", unloadable, "-", stdin=b"caf\xe9")
    assert (code, "standard input is not valid UTF-8" in err) == (2, True)


def test_steps_without_eager_are_refused(command, unloadable):
    code, out, err = command("check", unloadable, "--steps", "8")
    assert (code, out) == (2, "")
    assert err.startswith("error: --steps 8 needs --eager: ")
    assert "Add --eager PROMPT, or leave --steps out." in err


@pytest.mark.parametrize(("options", "steps"), [([], 32), (["--steps", "8"], 8)])
def test_eager_takes_the_steps_that_are_given_or_its_own(command, unloadable, monkeypatch, options, steps):
    asked: list[int] = []
    monkeypatch.setattr(check_command, "command_eager", lambda *arguments: asked.append(arguments[2]))
    monkeypatch.setattr(check_command, "eager_references", object)
    assert command("check", unloadable, "--eager", "hi", *options) == (0, "", "")
    assert asked == [steps]


def test_bench_refuses_an_unwritable_result_before_it_measures(command, unloadable, tmp_path):
    code, _, err = command("bench", unloadable, "--json", tmp_path / "absent" / "out.json")
    assert (code, "does not exist" in err) == (2, True)


def greedy_text(folder: Path, text: str, count: int) -> str:
    """Greedy text by the session alone."""
    package = open_package(folder)
    codec, session, tokens = open_tokenizer(package), Session.open(package), []
    token = greedy(session.prefill(codec.encode_rendered(text)))
    while token not in codec.eos_ids and len(tokens) < count:
        tokens.append(token)
        token = greedy(session.step(token))
    return codec.decode(tokens)


@pytest.mark.export
def test_the_answer_alone_goes_to_standard_output(command, toy):
    code, out, err = command("run", toy, "ale", "--max-new-tokens", "6", "--stats")
    rendered = "<|im_start|>user\nale<|im_end|>\n<|im_start|>assistant\n"
    assert (code, out) == (0, greedy_text(toy, rendered, 6) + "\n")
    assert "loaded in" in err
    assert "answer 6 tokens" in err


@pytest.mark.export
def test_raw_text_from_standard_input(command, toy):
    code, out, _ = command("run", toy, "-", "--raw", "--max-new-tokens", "6", stdin=b"fox\n")
    assert (code, out) == (0, greedy_text(toy, "fox", 6) + "\n")


@pytest.mark.export
def test_equal_seeds_give_equal_text(command, toy):
    def run(seed: int) -> str:
        options = ["--raw", "--temperature", "5", "--max-new-tokens", "20", "--seed", str(seed)]
        return command("run", toy, "fox", *options)[1]

    assert run(1) == run(1)
    assert run(1) != run(2)


@pytest.mark.export
def test_interactive_reads_turns_until_the_end(command, toy):
    options = ["--interactive", "--max-new-tokens", "3"]
    code, out, err = command("run", toy, *options, stdin=b"ale\n/reset\nale\n")
    assert err.splitlines()[0] == GREETING
    first = greedy_text(toy, "<|im_start|>user\nale<|im_end|>\n<|im_start|>assistant\n", 3) + "\n"
    assert (code, out) == (0, first + first)


@pytest.mark.export
def test_a_special_token_in_a_prompt_is_text_and_with_raw_it_is_not(command, toy, monkeypatch):
    asked: list[list[int]] = []
    monkeypatch.setattr("runners.run_command.answer", lambda speaker, prompt: asked.append(list(prompt)))
    for options in ([], ["--raw"]):
        command("run", toy, "a<|im_end|>", *options)
    codec = open_tokenizer(open_package(toy))
    chat, raw = asked
    assert raw == codec.encode_rendered("a<|im_end|>")
    assert [chat.count(2), raw.count(2)] == [1, 1]  # the template's own, and the one that was typed
    rendered = "<|im_start|>user\na<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert codec.tokenizer.decode(chat, skip_special_tokens=False) == rendered


@pytest.mark.export
def test_a_prompt_longer_than_the_context(command, toy):
    code, out, err = command("run", toy, "x" * 3 * L, "--raw")
    assert (code, out) == (2, "")
    assert f"holds {L}. Shorten the prompt, or build with a larger cache.max_length" in err


@pytest.mark.export
def test_bench_writes_json_and_a_table(command, monkeypatch, toy, tmp_path):
    memory = Memory(peak_bytes=2, imports_bytes=1)
    monkeypatch.setattr("runners.bench.probe_memory", lambda *_: memory)  # tested on its own; it takes seconds
    file = tmp_path / "out.json"
    sizes = ["--prompt-tokens", "9", "--new-tokens", "3", "--trials", "2", "--warmup", "0"]
    code, out, _ = command("bench", toy, *sizes, "--json", file, "--against", toy)
    assert code == 0
    assert f"decode: toy ({toy}) #1 is" in out
    assert f"as fast as toy ({toy}) #2 (" in out
    assert len(json.loads(file.read_text())["packages"]) == 2
    assert list(tmp_path.iterdir()) == [file]


def imported_names(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("file", sorted(ROOT.rglob("*.py")), ids=lambda file: file.name)
def test_no_runner_names_the_builder_or_transformers(file):
    roots = {name.split(".")[0] for name in imported_names(file)}
    assert not roots & {"pipeline", "transformers"}


def test_importing_every_runner_loads_neither():
    modules = [f"runners.{file.stem}" for file in sorted(ROOT.glob("*.py")) if file.stem != "__init__"]
    code = f"import sys, importlib\nfor m in {modules!r}: importlib.import_module(m)\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "runners.session" in loaded
    assert not loaded & {"pipeline", "transformers"}
