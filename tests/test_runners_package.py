"""Opening packages: every kind of damage is one clear error. The programs here are no programs: nothing loads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runners.errors import UserError
from runners.manifest import MANIFEST_NAME, Manifest, read_manifest, sealed, to_json
from runners.package import open_package
from tests.packages import Program, write_package


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_package(tmp_path / "toy", Program(b"no program" * 100))


def edit(folder: Path, **values: object) -> None:
    path = folder / MANIFEST_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change_manifest(**values):
    return lambda manifest: manifest.model_copy(update=values)


def test_a_sound_package_opens(folder):
    package = open_package(folder)
    assert package.manifest.name == "toy"
    assert package.program_path.is_file()
    assert package.tokenizer_path.is_file()
    assert package.chat_template_path.is_file()
    assert package.goldens_path is None


def test_sealing_survives_writing_and_reading(folder):
    manifest = read_manifest(folder / MANIFEST_NAME)
    assert sealed(manifest) == manifest
    assert len(manifest.digest) == 64
    (folder / "other.json").write_text(to_json(manifest))
    assert read_manifest(folder / "other.json") == manifest


def test_reformatting_a_manifest_is_no_edit(folder):
    edit(folder)
    assert open_package(folder).manifest.name == "toy"


@pytest.mark.parametrize(
    "values",
    [{"name": "other"}, {"files": {}}, {"digest": ""}, {"digest": "0" * 64}, {"backends": []}, {"unknown": 1}],
    ids=lambda values: next(iter(values)),
)
def test_an_edited_manifest_is_refused(folder, values):
    edit(folder, **values)
    with pytest.raises(UserError, match=r"manifest\.json was edited after the build"):
        open_package(folder)


def test_one_changed_digest_deep_inside_is_refused(folder):
    files = json.loads((folder / MANIFEST_NAME).read_text())["files"]
    files["model.pte"]["size"] += 1
    edit(folder, files=files)
    with pytest.raises(UserError, match="edited after the build"):
        open_package(folder)


@pytest.mark.parametrize(
    ("version", "advice"),
    [(2, "upgrade pteline"), (0, "Build the package again"), ("1", "Build the package again"), (True, "Build")],
)
def test_another_schema_version_is_refused_with_advice(folder, version, advice):
    edit(folder, schema_version=version)
    with pytest.raises(UserError, match=rf"schema_version is {version!r}, this pteline reads 1\. .*{advice}"):
        open_package(folder)


def test_a_sealed_manifest_of_another_shape_names_the_field(folder):
    path = folder / MANIFEST_NAME
    data = json.loads(path.read_text())
    broken = Manifest.model_construct(**{**data, "backends": "XnnpackBackend"})
    with pytest.warns(UserWarning, match="serializ"):
        path.write_text(to_json(sealed(broken)))
    with pytest.raises(UserError, match=r"'backends': .*list"):
        open_package(folder)


@pytest.mark.parametrize("text", ["", "{", "\xff", "[" * 100_000], ids=["empty", "cut", "binary", "deep"])
def test_a_manifest_that_is_no_json_is_refused(folder, text):
    (folder / MANIFEST_NAME).write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match="not readable as JSON"):
        open_package(folder)


def test_a_manifest_that_is_no_object_is_refused(folder):
    (folder / MANIFEST_NAME).write_text("[]")
    with pytest.raises(UserError, match="expected a JSON object, found list"):
        open_package(folder)


def test_a_truncated_program_is_refused_without_hashing(folder):
    program = folder / "model.pte"
    program.write_bytes(program.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"model\.pte: has 999 bytes, the manifest says 1000"):
        open_package(folder, verify=False)


def test_a_changed_file_of_equal_size_is_refused_when_hashed(folder):
    program = folder / "model.pte"
    program.write_bytes(b"X" + program.read_bytes()[1:])
    open_package(folder, verify=False)
    with pytest.raises(UserError, match=r"model\.pte: sha256 is [0-9a-f]{64}, the manifest says"):
        open_package(folder)


@pytest.mark.parametrize("name", ["model.pte", "tokenizer.json", "chat_template.jinja"])
def test_a_missing_file_is_refused(folder, name):
    (folder / name).unlink()
    with pytest.raises(UserError, match=f"{name}: missing, though the manifest lists it"):
        open_package(folder)


@pytest.mark.parametrize("name", ["../outside", "/etc/hosts"])
def test_a_file_outside_the_package_is_refused(tmp_path, name):
    def add(manifest: Manifest) -> Manifest:
        return manifest.model_copy(update={"files": {**manifest.files, name: manifest.files["model.pte"]}})

    folder = write_package(tmp_path / "toy", Program(b"x"), change=add)
    with pytest.raises(UserError, match="lies outside the package"):
        open_package(folder)


def test_a_program_without_a_digest_is_refused(tmp_path):
    folder = write_package(tmp_path / "toy", Program(b"x"), change=change_manifest(files={}))
    with pytest.raises(UserError, match=r"no digest for model\.pte"):
        open_package(folder)


def test_what_is_no_package_is_refused_with_advice(tmp_path, folder):
    with pytest.raises(UserError, match="no such directory; expected a package"):
        open_package(tmp_path / "absent")
    with pytest.raises(UserError, match=rf"model\.pte is a file; .* Give the directory {folder}"):
        open_package(folder / "model.pte")
    with pytest.raises(UserError, match=rf"has no manifest\.json; .* Packages inside it: {folder}"):
        open_package(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty has no manifest\.json"):
        open_package(tmp_path / "empty")
