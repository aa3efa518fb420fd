"""Sources on disk and on the hub: what is given back, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import pytest
from huggingface_hub import errors
from transformers import modeling_gguf_pytorch_utils as transformers_gguf

from pipeline.sources import fetch, hub
from pipeline.sources.kinds import kind
from pipeline.sources.parsed_once import parsed_once
from runners.errors import UserError
from runners.package import sha256_of
from tests import tiny


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Llama that a test may damage."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "llama"))


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    return tiny.save_gguf(tmp_path / "tiny.gguf")


def refused(source: str | Path, **options: object) -> str:
    with pytest.raises(UserError) as caught:
        fetch(str(source), **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("org/name", "hub"),
        ("gpt2", "hub"),
        ("./m", "folder"),
        ("../m.gguf", "gguf"),
        ("/a/m.GGUF", "gguf"),
        ("~/m", "folder"),
        ("pypi:a==1.0/b/c.gguf", "pypi"),
        ("pypi:a==1.0/b/c/", "pypi"),
        ("pypi:a==1.0/b/c.zip", "pypi"),
        ("pypi:a==1.0/c.gguf.part00 + pypi:b==1.0+cpu/c.gguf.part01", "pypi"),
    ],
)
def test_kinds(source, expected):
    assert kind(source) == expected


def test_folder(folder):
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# card\n")
    fetched = fetch(str(folder))
    assert (fetched.path, fetched.kind, fetched.licence, fetched.revision) == (folder, "folder", "mit", None)
    assert fetched.has_tokenizer


def test_folder_digest_is_of_names_and_content(folder, tmp_path):
    digest = fetch(str(folder)).digest
    (folder / "notes.md").write_text("not part of the model")
    moved = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    assert fetch(str(moved)).digest == digest
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    assert fetch(str(folder)).digest != digest
    (moved / "generation_config.json").rename(moved / "other.json")
    assert fetch(str(moved)).digest != digest


def test_folder_that_is_none(tmp_path):
    assert f"{tmp_path}/none does not exist" in refused(tmp_path / "none")
    assert f"{tmp_path} has no config.json" in refused(tmp_path)
    (tmp_path / "file").write_text("x")
    assert "is a file; expected a folder or a .gguf file" in refused(tmp_path / "file")


def test_truncated_safetensors(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert f"{weights}: truncated or damaged safetensors file" in refused(folder)


def test_missing_shard(folder):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    message = refused(folder)
    assert "names files that are not there: model-00001-of-00002.safetensors; fetch" in message


def test_damaged_config(folder):
    (folder / "config.json").write_text("{")
    assert f"{folder}/config.json: not valid JSON" in refused(folder)
    (folder / "config.json").write_text("[]")
    assert "expected a JSON object, got list" in refused(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickles_need_permission(folder, name):
    (folder / "model.safetensors").rename(folder / name)
    assert f"{folder}/{name}: the only weights here are pickled" in refused(folder)
    without = fetch(str(folder), allow_pickle=True).digest
    (folder / name).write_bytes(b"other")
    assert fetch(str(folder), allow_pickle=True).digest != without


def test_pickles_beside_safetensors_are_not_read(folder):
    digest = fetch(str(folder)).digest
    (folder / "pytorch_model.bin").write_bytes(b"x")
    assert fetch(str(folder)).digest == digest


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_remote_code_needs_permission(folder, name):
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": {"AutoConfig": "x.Y"}}))
    assert f"{path}: the key 'auto_map' asks for Python code" in refused(folder)
    assert fetch(str(folder), trust_remote_code=True).path == folder


@pytest.mark.parametrize(
    ("model_type", "names", "has"),
    [
        ("albert", ["vocab.txt"], False),  # transformers would make an empty tokenizer of it
        ("bert", ["vocab.txt"], True),
        ("unheard-of", ["vocab.txt"], True),
        ("albert", ["vocab.txt", "tokenizer.json"], True),
        ("albert", [], False),
    ],
)
@pytest.mark.filterwarnings("ignore:.*reads no such file")
def test_vocab_txt_counts_where_it_is_read(tmp_path, model_type, names, has):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    for name in names:
        (tmp_path / name).write_text("{}")
    assert fetch(str(tmp_path)).has_tokenizer is has


def test_unread_vocab_txt_is_told(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "vocab.txt").write_text("[UNK]\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "AlbertTokenizer"}')
    with pytest.warns(UserWarning, match="vocab.txt: transformers' AlbertTokenizer reads no such file"):
        assert not fetch(str(tmp_path)).has_tokenizer


def test_gguf(gguf_file):
    fetched = fetch(str(gguf_file), sha256=sha256_of(gguf_file))
    assert (fetched.path, fetched.kind, fetched.licence) == (gguf_file, "gguf", "MIT")
    assert fetched.digest == sha256_of(gguf_file)
    assert fetched.has_tokenizer


def test_gguf_without_tokenizer(tmp_path):
    assert not fetch(str(tiny.save_gguf(tmp_path / "t.gguf", with_tokenizer=False))).has_tokenizer


def test_the_reader_that_parses_once_reads_what_gguf_s_own_reads(gguf_file):
    plain = gguf.GGUFReader(gguf_file)
    with parsed_once():
        quick = gguf.GGUFReader(gguf_file)
        assert gguf.GGUFReader(str(gguf_file)) is quick
        found = [transformers_gguf.load_gguf_checkpoint(str(gguf_file)) for _ in range(2)]
    assert {name: field.contents() for name, field in quick.fields.items()} == {
        name: field.contents() for name, field in plain.fields.items()
    }
    for mine, theirs in zip(quick.tensors, plain.tensors, strict=True):
        assert (mine.name, mine.shape.tolist()) == (theirs.name, theirs.shape.tolist())
        assert mine.data.tobytes() == theirs.data.tobytes()
    assert found == [transformers_gguf.load_gguf_checkpoint(str(gguf_file))] * 2


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.5, 0.9, 0.9999])
def test_truncated_gguf(gguf_file, share):
    whole = gguf_file.read_bytes()
    gguf_file.write_bytes(whole[: int(len(whole) * share)])
    message = refused(gguf_file)
    assert f"{gguf_file}: truncated" in message
    assert "fetch it again" in message


def test_gguf_that_is_none(tmp_path):
    path = tmp_path / "m.gguf"
    assert f"no such file: {path}" in refused(path)
    path.write_bytes(b"")
    assert "not a GGUF file: it begins with b''" in refused(path)
    path.write_bytes(b"<html>")
    assert "not a GGUF file: it begins with b'<htm'" in refused(path)
    (tmp_path / "d.gguf").mkdir()
    assert "cannot be read" in refused(tmp_path / "d.gguf")


def test_gguf_with_nonsense_in_the_header(gguf_file):
    content = bytearray(gguf_file.read_bytes())
    content[4:24] = b"\xff" * 20  # version, tensor count, key count
    gguf_file.write_bytes(content)
    assert "truncated or damaged GGUF file" in refused(gguf_file)


def test_gguf_wrong_sha256(gguf_file):
    message = refused(gguf_file, sha256="0" * 64)
    assert sha256_of(gguf_file) in message
    assert "0" * 64 in message


def hub_error(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)  # their constructors want a whole HTTP response
    error.args = ("said the hub",)
    return error


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (hub_error(errors.GatedRepoError), "is gated; accept its terms"),
        (hub_error(errors.RepositoryNotFoundError), "the hub has no 'org/name'"),
        (hub_error(errors.RevisionNotFoundError), "model.revision: 'org/name' at revision 'v1' does not exist"),
        (errors.LocalEntryNotFoundError("x"), "the hub cannot be reached"),
        (errors.OfflineModeIsEnabled("x"), "the hub cannot be reached"),
        (hub_error(errors.HfHubHTTPError), "failed: said the hub; try again"),
        (ConnectionResetError("reset"), "failed: reset; try again"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_hub_errors(monkeypatch, error, says):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(hub, "snapshot_download", fail)
    assert says in refused("org/name", revision="v1")


def test_hub_gives_commit_and_asks_for_no_pickles(monkeypatch, folder, tmp_path):
    asked = {}

    def snapshot(repository, **options):
        asked.update(options, repository=repository)
        return str(folder.rename(tmp_path / "c0ffee"))

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    fetched = fetch("org/name", revision="main")
    assert fetched.revision == "c0ffee"
    assert (asked["repository"], asked["revision"]) == ("org/name", "main")
    assert "*.safetensors" in asked["allow_patterns"]
    assert not {"*.bin", "*.pt", "*.pth", "*.py"} & set(asked["allow_patterns"])
