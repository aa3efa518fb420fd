"""The package directory: whole or not at all, and nothing that was there before is lost."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import package
from pipeline.package import publish, staging
from runners.errors import UserError
from tests.test_stage_cache import dead_process


def write_package(folder: Path, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_text(text)
    (folder / "model.pte").write_text(text)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def build(target: Path, text: str) -> None:
    with staging(target) as directory:
        write_package(directory, text)
        publish(directory, target)


def test_a_package_gets_its_name_and_nothing_else_stays(tmp_path: Path) -> None:
    build(tmp_path / "dist" / "m", "one")
    assert names(tmp_path / "dist") == {"m"}
    assert (tmp_path / "dist" / "m" / "model.pte").read_text() == "one"
    assert (tmp_path / "dist" / "m").stat().st_mode & 0o777 == 0o755


def test_a_package_of_that_name_is_replaced(tmp_path: Path) -> None:
    build(tmp_path / "m", "one")
    (tmp_path / "m" / "old.file").write_text("of the first build")
    build(tmp_path / "m", "two")
    assert names(tmp_path) == {"m"}
    assert names(tmp_path / "m") == {"manifest.json", "model.pte"}
    assert (tmp_path / "m" / "model.pte").read_text() == "two"


def test_a_build_that_fails_leaves_the_earlier_package(tmp_path: Path) -> None:
    build(tmp_path / "m", "one")
    with pytest.raises(RuntimeError, match="inside"), staging(tmp_path / "m") as directory:
        (directory / "model.pte").write_text("half")
        raise RuntimeError("inside")
    assert names(tmp_path) == {"m"}
    assert (tmp_path / "m" / "model.pte").read_text() == "one"


@pytest.mark.parametrize("error", [OSError("no"), SystemExit(143), KeyboardInterrupt()], ids=["disk", "signal", "key"])
def test_the_earlier_package_is_back_when_the_rename_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    build(tmp_path / "m", "one")
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if ".new-" in self.name:
            raise error
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(type(error)):
        build(tmp_path / "m", "two")
    assert names(tmp_path) == {"m"}
    assert (tmp_path / "m" / "model.pte").read_text() == "one"


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch], ids=["folder", "file"])
def test_a_target_that_is_no_package_is_refused_and_left_alone(tmp_path: Path, make) -> None:
    make(tmp_path / "m")
    with pytest.raises(UserError, match=r"m exists and is not of a build \(it has no manifest\.json\)"):
        build(tmp_path / "m", "one")
    assert names(tmp_path) == {"m"}


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"package\.directory: cannot write to .*file.* \(.+\)"):
        build(tmp_path / "file" / "m", "one")


# After a kill, which runs nothing


def test_what_a_killed_build_left_is_cleared_and_a_running_ones_is_not(tmp_path: Path) -> None:
    dead, own = dead_process(), os.getpid()
    for name in (f".m.new-{dead}-abcd_123", f".m.new-{own}-abcd_123"):
        write_package(tmp_path / name, "half")
    build(tmp_path / "m", "one")
    assert names(tmp_path) == {"m", f".m.new-{own}-abcd_123"}


def test_a_package_that_a_killed_build_had_set_aside_is_put_back(tmp_path: Path) -> None:
    write_package(tmp_path / f".m.old-{dead_process()}", "one")
    with pytest.raises(RuntimeError), staging(tmp_path / "m"):
        assert (tmp_path / "m" / "model.pte").read_text() == "one"
        raise RuntimeError
    assert names(tmp_path) == {"m"}


def test_a_package_set_aside_is_cleared_where_its_successor_stands(tmp_path: Path) -> None:
    write_package(tmp_path / "m", "two")
    write_package(tmp_path / f".m.old-{dead_process()}", "one")
    with staging(tmp_path / "m"):
        pass
    assert names(tmp_path) == {"m"}
    assert (tmp_path / "m" / "model.pte").read_text() == "two"


def test_what_belongs_to_a_package_of_a_longer_name_is_left_alone(tmp_path: Path) -> None:
    dead = dead_process()
    others = {f".m.new-x.new-{dead}-abcd_123", f".m.old-x.old-{dead}", ".m.newer", ".m.old-fashioned"}
    for name in others:
        write_package(tmp_path / name, "theirs")
    build(tmp_path / "m", "one")
    assert names(tmp_path) == {"m", *others}


INTERRUPTED = """
import signal, sys, time
from pathlib import Path
from pipeline.cli import _terminate
from pipeline.package import staging

signal.signal(signal.SIGTERM, _terminate)
with staging(Path(sys.argv[1])) as directory:
    (directory / "model.pte").write_text("half")
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_the_earlier_package_and_at_most_what_the_next_build_clears(
    tmp_path: Path, number: signal.Signals
) -> None:
    build(tmp_path / "m", "one")
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "m")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        assert {name for name in names(tmp_path) if ".new-" not in name} == {"m", ".m.lock"}
        with pytest.raises(UserError, match=rf"another build \(process {process.pid}\) is writing .*m; wait until"):
            build(tmp_path / "m", "two at once")
        process.send_signal(number)
        process.wait()
    assert process.returncode != 0
    if number != signal.SIGKILL:
        assert names(tmp_path) == {"m"}
    assert (tmp_path / "m" / "model.pte").read_text() == "one"
    build(tmp_path / "m", "two")
    assert names(tmp_path) == {"m"}


def test_the_lock_is_of_one_name_and_goes_with_the_block(tmp_path: Path) -> None:
    with staging(tmp_path / "m"), staging(tmp_path / "n"):
        with pytest.raises(UserError, match=rf"another build \(process {os.getpid()}\) is writing .*m;"):
            build(tmp_path / "m", "two")
        assert not (tmp_path / "m").exists()
    assert names(tmp_path) == set()
    build(tmp_path / "m", "one")


def test_a_lock_that_another_build_removes_meanwhile_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening the file and locking it, the build that held the lock may end and remove the name."""
    flock, calls = fcntl.flock, []

    def late(descriptor: int, flags: int) -> None:
        if not calls:
            (tmp_path / ".m.lock").unlink()
        calls.append(descriptor)
        flock(descriptor, flags)

    monkeypatch.setattr(fcntl, "flock", late)
    with staging(tmp_path / "m"):
        assert (tmp_path / ".m.lock").read_text() == str(os.getpid())
        assert len(calls) == 2
        with pytest.raises(UserError, match="another build"):
            build(tmp_path / "m", "two")
    assert names(tmp_path) == set()


def test_every_file_can_be_read_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def private(goldens: object, path: Path) -> None:
        path.touch(mode=0o600)

    from pipeline.artifacts import Emitted, LoadedTokenizer

    monkeypatch.setattr(package, "save_goldens", private)
    (tmp_path / "elsewhere.pte").write_text("program")
    directory = tmp_path / "new"
    directory.mkdir()
    tokenizer = LoadedTokenizer("{}", "template", info=None)
    package.write_content(directory, Emitted(tmp_path / "elsewhere.pte", facts=None), tokenizer)
    package.write_goldens(directory, object())
    assert names(directory) == {"model.pte", "tokenizer.json", "chat_template.jinja", "goldens.safetensors"}
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in directory.iterdir())
