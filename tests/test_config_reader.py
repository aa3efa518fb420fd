"""Reading configurations that are right: inheritance, overrides, paths, schema."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config_reader import json_schema, read, resolved
from runners.errors import UserError

MINIMAL = "name: a\nmodel:\n  source: org/name\n"


def write(folder: Path, **files: str) -> Path:
    """Write ``a="…"`` to a.yaml and so on; gives the path of the last one."""
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder / f"{name}.yaml"


def test_defaults(tmp_path):
    settings = read(write(tmp_path, a=MINIMAL))
    assert settings.cache.max_length == 2048
    assert settings.export.methods == ("forward",)
    assert settings.check.perplexity is None


def test_extends_merges_mappings_and_replaces_lists(tmp_path):
    base = "model: {source: org/name}\ncache: {max_length: 64}\ncheck: {prompts: [x, y], steps: 3}\n"
    middle = "extends: base.yaml\ncheck: {prompts: [z]}\n"
    settings = read(write(tmp_path, base=base, middle=middle, top="extends: middle.yaml\nname: top\n"))
    assert settings.check.prompts == ("z",)
    assert settings.check.steps == 3
    assert settings.cache.max_length == 64


def test_extends_can_take_an_optional_section_away(tmp_path):
    base = f"{MINIMAL}check: {{perplexity: {{text: t.txt}}}}\n"
    top = "extends: base.yaml\ncheck: {perplexity: null}\n"
    assert read(write(tmp_path, base=base, top=top)).check.perplexity is None


def test_overrides_win_over_the_file(tmp_path):
    path = write(tmp_path, a=MINIMAL + "quantize: {linear: 8da8w}\n")
    settings = read(path, ["quantize.linear=none", "check.prompts=[a, b]", "check.steps=7", "model.revision="])
    assert settings.quantize.linear == "none"
    assert settings.check.prompts == ("a", "b")
    assert settings.check.steps == 7
    assert settings.model.revision is None


def test_the_last_override_wins(tmp_path):
    assert read(write(tmp_path, a=MINIMAL), ["check.steps=7", "check.steps=8"]).check.steps == 8


def test_override_value_may_hold_equals_signs(tmp_path):
    assert read(write(tmp_path, a=MINIMAL), ["check.prompts=['1+1=2']"]).check.prompts == ("1+1=2",)


def test_relative_paths_belong_to_the_file_that_wrote_them(tmp_path, monkeypatch):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "base.yaml").write_text("model: {source: ./m}\ncheck: {perplexity: {text: t.txt}}\n")
    path = write(tmp_path, a="extends: deep/base.yaml\nname: a\n")
    settings = read(path)
    assert settings.model.source == str(tmp_path / "deep" / "m")
    assert settings.check.perplexity is not None
    assert settings.check.perplexity.text == tmp_path / "deep" / "t.txt"
    monkeypatch.chdir(tmp_path)
    settings = read(Path("a.yaml"))
    assert settings.model.source == "./deep/m"
    assert settings.check.perplexity is not None
    assert settings.check.perplexity.text == Path("deep/t.txt")


def test_relative_paths_of_overrides_belong_to_the_working_directory(tmp_path, monkeypatch):
    path = write(tmp_path, a=MINIMAL)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert read(path, ["model.source=../m.gguf"]).model.source == "../m.gguf"
    assert read(path, ["model.source=./m.gguf"]).model.source == "./m.gguf"


def test_hub_ids_and_home_are_not_taken_for_relative_paths(tmp_path):
    path = write(tmp_path, a=MINIMAL)
    assert read(path).model.source == "org/name"
    assert read(path, ["model.source=~/m"]).model.source == str(Path.home() / "m")


def test_anchors_and_merge_keys(tmp_path):
    text = (
        MINIMAL + "check:\n  quantized: &limits {max_mean_kl: 1.0}\n  unquantized:\n    <<: *limits\n  prompts: [x]\n"
    )
    assert read(write(tmp_path, a=text)).check.unquantized.max_mean_kl == 1.0


def test_resolved_is_complete_json(tmp_path):
    plain = resolved(read(write(tmp_path, a=MINIMAL)))
    defaults = {"max_length": 2048, "batch_size": 1, "max_encoder_length": None, "placement": "buffer"}
    assert plain["cache"] == defaults
    assert plain["export"]["methods"] == ["forward"]


def test_schema_describes_every_key():
    schema = json_schema()
    assert schema["properties"]["extends"]["type"] == "string"
    assert "required" not in schema
    for name, section in schema["$defs"].items():
        assert section["additionalProperties"] is False, name
        for key, described in section["properties"].items():
            assert described.get("description"), f"{name}.{key} has no description"
    linear = schema["$defs"]["QuantizeSettings"]["properties"]["linear"]
    assert "8da4w" in linear["enum"]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_cycles_are_refused(tmp_path, count):
    files = {f"f{i}": f"extends: f{(i + 1) % count}.yaml\n" for i in range(count)}
    with pytest.raises(UserError, match=r"extends itself: f\d\.yaml -> "):
        read(write(tmp_path, **files))
