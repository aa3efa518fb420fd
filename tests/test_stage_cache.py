"""The stage cache: entries appear whole or not at all, and never cost a build."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError

from pipeline import stage_cache
from pipeline.stage_cache import StageCache, key_of


def write(text: str):
    return lambda folder: (folder / "result").write_text(text)


def entries(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def dead_process() -> int:
    """The id of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_what_was_stored_is_found(tmp_path: Path) -> None:
    cache = StageCache(tmp_path / "new" / "stages")
    assert cache.find("export", "a") is None
    cache.store("export", "a", write("one"))
    found = cache.find("export", "a")
    assert found is not None
    assert (found / "result").read_text() == "one"
    assert cache.find("emit", "a") is None
    assert cache.find("export", "b") is None
    assert entries(tmp_path / "new" / "stages") == {"export-a"}


def test_an_entry_is_replaced(tmp_path: Path) -> None:
    cache = StageCache(tmp_path)
    cache.store("export", "a", write("one"))
    cache.store("export", "a", write("two"))
    assert (tmp_path / "export-a" / "result").read_text() == "two"
    assert entries(tmp_path) == {"export-a"}


def test_without_a_root_nothing_is_written(tmp_path: Path) -> None:
    def refuse(folder: Path) -> None:
        raise AssertionError("asked to write")

    StageCache(None).store("export", "a", refuse)
    assert StageCache(None).find("export", "a") is None


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed writing"), SafetensorError("io")],
    ids=["system", "torch", "safetensors"],
)
def test_a_full_disk_costs_the_entry_and_nothing_else(tmp_path: Path, error: Exception) -> None:
    def half(folder: Path) -> None:
        (folder / "result").write_text("half")
        raise error

    cache = StageCache(tmp_path)
    cache.store("export", "b", write("another"))
    cache.store("export", "a", half)
    assert cache.find("export", "a") is None
    assert entries(tmp_path) == {"export-b"}


def test_a_fault_of_the_writer_is_not_hidden_and_leaves_nothing(tmp_path: Path) -> None:
    def wrong(folder: Path) -> None:
        (folder / "result").write_text("half")
        raise KeyError("no such method")

    with pytest.raises(KeyError):
        StageCache(tmp_path).store("export", "a", wrong)
    assert entries(tmp_path) == set()


def test_a_root_that_cannot_be_made_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = StageCache(tmp_path / "file" / "stages")
    cache.store("export", "a", write("one"))
    assert cache.find("export", "a") is None
    assert (tmp_path / "file").read_text() == "in the way"


def test_an_entry_without_its_mark_is_not_found(tmp_path: Path) -> None:
    cache = StageCache(tmp_path)
    cache.store("export", "a", write("one"))
    (tmp_path / "export-a" / "complete").unlink()
    assert cache.find("export", "a") is None


def test_what_a_killed_build_left_is_cleared_and_a_running_ones_is_not(tmp_path: Path) -> None:
    left, running = tmp_path / f".new-{dead_process()}-abc", tmp_path / f".new-{os.getpid()}-abc"
    for folder in (left, running):
        folder.mkdir()
        (folder / "result").write_text("half")
    StageCache(tmp_path).store("export", "a", write("one"))
    assert entries(tmp_path) == {"export-a", running.name}


def test_the_least_recently_used_entries_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_cache, "LIMIT_BYTES", 250)
    cache = StageCache(tmp_path)
    for age, key in ((300, "a"), (200, "b")):
        cache.store("export", key, write("x" * 100))
        moment = (tmp_path / f"export-{key}").stat().st_mtime - age
        os.utime(tmp_path / f"export-{key}", (moment, moment))
    assert cache.find("export", "a") is not None  # used now: the other one is older
    cache.store("export", "c", write("x" * 100))
    assert entries(tmp_path) == {"export-a", "export-c"}


def test_an_entry_above_the_limit_is_kept_for_its_own_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_cache, "LIMIT_BYTES", 10)
    cache = StageCache(tmp_path)
    cache.store("export", "a", write("x" * 100))
    assert entries(tmp_path) == {"export-a"}
    cache.store("export", "b", write("x" * 100))
    assert entries(tmp_path) == {"export-b"}


def test_a_key_depends_on_every_part_the_libraries_and_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    key = key_of({"a": 1, "b": [2]}, "x")
    assert key_of({"b": [2], "a": 1}, "x") == key
    assert key_of({"a": 1, "b": [3]}, "x") != key
    assert key_of({"a": 1, "b": [2]}, "y") != key
    with monkeypatch.context() as other:
        other.setattr(stage_cache, "version", lambda name: "0")
        assert key_of({"a": 1, "b": [2]}, "x") != key
    with monkeypatch.context() as other:
        other.setattr(stage_cache, "_code_digest", lambda: "edited")
        assert key_of({"a": 1, "b": [2]}, "x") != key
