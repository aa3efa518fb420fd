"""Configurations that are wrong: each gives one error that names place and key, and says what to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.config_reader import read
from runners.errors import UserError

SHA = "0" * 64
MODEL = "name: a\nmodel: {source: org/name}\n"
PERPLEXITY = "perplexity: {text: t.txt}"

# text after MODEL (its first line is line 3), line of the error, key, what the message must say
SETTINGS = [
    (
        "quantize:\n  linaer: none",
        4,
        "quantize.linaer",
        "unknown key; did you mean 'linear'? accepted: linear, group_size",
    ),
    ("quantise: {}", 3, "quantise", "unknown key; did you mean 'quantize'? accepted: extends, name, model"),
    (
        "check:\n  unquantized:\n    max_kl_over_rounding: 2",
        5,
        "check.unquantized.max_kl_over_rounding",
        "unknown key",
    ),
    ("check:\n  quantized:\n    max_kl: 1.0", 5, "check.quantized.max_kl", "did you mean 'max_mean_kl'?"),
    (
        "quantize:\n\n  linear: 8da5w",
        5,
        "quantize.linear",
        "the text '8da5w' is not known; did you mean '8da8w'? accepted: none",
    ),
    (
        "quantize: {lm_head: 8ww}",
        3,
        "quantize.lm_head",
        "the text '8ww' is not known; did you mean '8da8w'? accepted: none, 8da4w, 8da8w\n",
    ),
    ("quantize: {embedding: 8ww}", 3, "quantize.embedding", "did you mean '8w'? accepted: none, 8w, 4w\n"),
    (
        "quantize: {linear: x}\nlower: {max_delegates: 1}",
        3,
        "quantize.linear",
        "accepted: none, 8da4w, 8da8w\n",  # 4w and 8w are schemes too, which xnnpack does not take
    ),
    ("export: {methods: [forward, decod]}", 3, "export.methods[1]", "did you mean 'decode'? accepted: forward, decode"),
    ("export: {methods: [decode]}", 3, "export.methods", "must contain 'forward'"),
    ("export: {methods: [forward, forward]}", 3, "export.methods", "must not repeat"),
    ("cache: {max_length: 0}", 3, "cache.max_length", "expected a number above 0, got the number 0"),
    ("cache: {max_length: -4}", 3, "cache.max_length", "expected a number above 0, got the number -4"),
    ("cache: {max_length: 2k}", 3, "cache.max_length", "expected a whole number, got the text '2k'"),
    ("cache: {max_length: 12.5}", 3, "cache.max_length", "expected a whole number, got the number 12.5"),
    ("cache: {max_length: true}", 3, "cache.max_length", "expected a whole number, got the flag true"),
    ("cache: {max_length: '64'}", 3, "cache.max_length", "expected a whole number, got the text '64'"),
    ("cache: 64", 3, "cache", "expected a mapping of settings"),
    ("cache:", 3, "cache", "expected a mapping of settings (leave the key out for the defaults), got nothing (null)"),
    ("check: {chat: 'yes'}", 3, "check.chat", "expected true or false, got the text 'yes'"),
    ("check: {prompts: hello}", 3, "check.prompts", "expected a list, got the text 'hello'"),
    (
        "check:\n  prompts:\n    - x\n    - 3",
        6,
        "check.prompts[1]",
        "expected text (put it in quotes), got the number 3",
    ),
    ("check: {prompts: ['']}", 3, "check.prompts[0]", "expected text that is not empty"),
    ("check: {prompts: [x], quantized: {min_equal_prompts: 1.5}}", 3, "check.quantized.min_equal_prompts", "at most 1"),
    (
        "check: {prompts: [x], quantized: {max_margin: .inf}}",
        3,
        "check.quantized.max_margin",
        "expected a finite number",
    ),
    ("check: {perplexity: {tokens: 5}}", 3, "check.perplexity.text", "missing; this setting has no default"),
    ("check: {perplexity: {text: 2020-01-01}}", 3, "check.perplexity.text", "expected plain YAML, got a date"),
    # combinations
    ("quantize: {group_size: 32}", 3, "quantize.group_size", "neither has groups; remove it (null), or choose 8da4w"),
    ("quantize: {linear: 8da8w, group_size: 32}", 3, "quantize.group_size", "linear is 8da8w and lm_head 8da8w"),
    ("quantize: {linear: 8da8w, scales: hqq}", 3, "quantize.scales", "remove it (null), or choose 8da4w"),
    ("quantize: {linear: 8da4w, group_size: 7}", 3, "quantize.group_size", "7 is no multiple of 32"),
    ("quantize: {linear: 8w}", 3, "quantize.linear", "xnnpack takes no 8w layer"),
    ("quantize: {embedding_group_size: 32}", 3, "quantize.embedding_group_size", "embedding is none"),
    (
        "cache: {max_length: 64}\nexport: {max_prefill_length: 65}\ncheck: {steps: 1}",
        4,
        "export.max_prefill_length",
        "64",
    ),
    ("cache: {placement: io}\nexport: {attention: custom}", 3, "cache.placement", "set export.attention: portable"),
    (
        "cache: {placement: io}\nexport: {attention: portable, methods: [forward, decode]}",
        4,
        "export.methods",
        "decode shares cache buffers with forward",
    ),
    ("check: {long_prompt: 9}", 3, "check.long_prompt", "check.perplexity.text, which is not given"),
    ("check: {quantized: {max_perplexity_ratio: 1.1}}", 3, "check.quantized.max_perplexity_ratio", "give a text"),
    ("check: {unquantized: {max_mean_kl: 0.1}}", 3, "check.unquantized.max_mean_kl", "there is no prompt to compare"),
    (
        "quantize: {embedding: 8w}\ncheck: {prompts: [x], quantized: {max_kl_over_rounding: 2}}",
        4,
        "check.quantized.max_kl_over_rounding",
        "without a linear scheme that quantizes activations (8da4w, 8da8w) no rounding is measured",
    ),
    (
        "quantize: {lm_head: 8da8w}\ncheck: {quantized: {max_kl_over_rounding: 2}}",
        4,
        "check.quantized.max_kl_over_rounding",
        "there is no prompt to compare",
    ),
    ("cache: {max_length: 32}\ncheck: {prompts: [x], steps: 32}", 4, "check.steps", "cache.max_length is 32"),
    (
        f"cache: {{max_length: 600}}\ncheck: {{long_prompt: 580, steps: 21, {PERPLEXITY}}}",
        4,
        "check.long_prompt",
        "580 tokens and 21 steps do not fit",
    ),
    (f"cache: {{max_length: 100}}\ncheck: {{{PERPLEXITY}}}", 4, "check.perplexity", "512 tokens do not fit"),
    ("export: {top_k: 0}", 3, "export.top_k", "expected a number above 0, got the number 0"),
    ("export: {top_k: all}", 3, "export.top_k", "expected a whole number, got the text 'all'"),
    ("cache: {batch_size: 2}\nexport: {top_k: 4}", 4, "export.top_k", "cache.batch_size is 2; set that to 1"),
    (
        "export: {top_k: 4}\ncheck: {prompts: [x], quantized: {max_mean_kl: 0.1}}",
        4,
        "check.quantized.max_mean_kl",
        "takes the logits of all tokens, and with export.top_k the program gives 4; remove it (null)",
    ),
    (
        f"export: {{top_k: 4}}\ncheck: {{long_prompt: 4, {PERPLEXITY}, unquantized: {{max_perplexity_ratio: 2}}}}",
        4,
        "check.unquantized.max_perplexity_ratio",
        "takes the logits of all tokens",
    ),
    (f"export: {{top_k: 4}}\ncheck: {{prompts: [x], {PERPLEXITY}}}", 4, "check.perplexity", "the logits of all tokens"),
]

# settings of the section ``model``, key, what the message must say
MODELS = [
    ("source: pypi:a==1/b.gguf", "model.source", "needs model.sha256"),
    (f"source: pypi:a/b.gguf\n  sha256: '{SHA}'", "model.source", "expected pypi:NAME==VERSION/path/in/wheel.gguf"),
    (f"source: pypi:a==1/../b.gguf\n  sha256: '{SHA}'", "model.source", "must stay inside it"),
    (f"source: pypi:a==1/b.bin\n  sha256: '{SHA}'", "model.source", "a folder (its path ends in /), got 'b.bin'"),
    (f"source: pypi:a==1/b.gguf.part00\n  sha256: '{SHA}'", "model.source", "is one part of a file; name all of them"),
    (
        f"source: pypi:a==1/b.gguf.part00 + pypi:a==1/c.zip\n  sha256: '{SHA}'",
        "model.source",
        "only parts of one .gguf file (.gguf.part00) are joined, got 'c.zip'",
    ),
    (f"source: pypi:a==1/b.gguf\n  sha256: '{SHA}'\n  allow_pickle: true", "model.allow_pickle", "has no effect"),
    (f"source: pypi:a==1/b.gguf\n  sha256: '{SHA}'\n  revision: x", "model.revision", "the version and sha256 pin it"),
    (f"source: org/name\n  sha256: '{SHA}'", "model.sha256", "pin it with model.revision"),
    (f"source: ./folder\n  sha256: '{SHA}'", "model.sha256", "the manifest records a digest"),
    ("source: ./folder\n  revision: x", "model.revision", "only a hub id has revisions"),
    ("source: ./m.gguf\n  revision: x", "model.revision", "pin it with model.sha256"),
    ("source: ./m.gguf\n  sha256: abc", "model.sha256", "expected 64 lower-case hexadecimal digits"),
    ("source: ./m.gguf\n  trust_remote_code: true", "model.trust_remote_code", "has no effect"),
    ("source: ./m.gguf\n  allow_pickle: true", "model.allow_pickle", "has no effect"),
    ("source: m.gguf", "model.source", "written with ./ before it: ./m.gguf"),
    ("source: a/b/c", "model.source", "expected a hub id (org/name), a folder (./folder)"),
    ("source: 5", "model.source", "expected text (put it in quotes), got the number 5"),
    ("revision: x", "model.source", "missing"),
    ("source: org/name\n  num_layers: 0", "model.num_layers", "expected a number above 0"),
    ("source: org/name\n  random_weights_seed: -1", "model.random_weights_seed", "expected a number of at least 0"),
    ("source: org/name\n  task: chat", "model.task", "accepted: text-generation"),
]

# whole files, what the message must say after the path
FILES = [
    ("", ": the file is empty"),
    ("# only a comment\n", ": the file is empty"),
    ("- a\n- b\n", ":1: expected a mapping of sections (key: value), got a list"),
    ("just text", ":1: expected a mapping of sections (key: value), got the text 'just text'"),
    ("name: a\nname: b\n", ':2:1: not valid YAML: found duplicate key "name"'),
    ("name: a\nmodel:\n\tsource: x\n", ":3:1: not valid YAML: found character '\\t'"),
    ("name: [a\n", ":2:1: not valid YAML: expected ',' or ']'"),
    ("name: a\n---\nname: b\n", ":2:1: not valid YAML: but found another document"),
    ("name: \x07\n", ": not valid YAML: unacceptable character"),
    ("[" * 4000, ": not valid YAML: nested too deeply"),
    ("3: x\n", ":1: a key must be text, got the number 3"),
    ("name: !tag x\n", ":1: name: expected plain YAML, got the tag !tag"),
    ("model: {source: org/name}\n", ":1: name: missing; a configuration without a name is a base"),
    ("name: a b\nmodel: {source: org/name}\n", ":1: name: expected letters, digits"),
    ("extends: other.yaml\n", ":1: extends: no such file: "),
    ("name: a\nextends: [b]\n", ":2: extends: expected the path of one YAML file, got a list"),
]

OVERRIDES = [
    ("quantize.linear=8da5w", "--set quantize.linear: the text '8da5w' is not known; did you mean '8da8w'?"),
    ("quantize.linaer=none", "--set quantize.linaer: unknown key; did you mean 'linear'?"),
    ("quantize=3", "--set quantize: expected a mapping of settings"),
    ("check.prompts.0=x", "--set check.prompts.0: check.prompts: expected a list, got a mapping"),
    ("check.steps=[", "--set check.steps:1:2: not valid YAML"),
    ("check.steps", "--set check.steps: expected KEY=VALUE"),
    ("=3", "--set =3: expected KEY=VALUE"),
    ("check..steps=3", "--set check..steps=3: expected KEY=VALUE"),
    ("extends=b.yaml", "--set extends=b.yaml: 'extends' belongs in the file"),
]


def refused(path: Path, overrides: tuple[str, ...] = ()) -> str:
    """The message of the UserError that reading ``path`` ends with."""
    with pytest.raises(UserError) as caught:
        read(path, overrides)
    return str(caught.value)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(("text", "line", "key", "says"), SETTINGS, ids=lambda value: str(value)[:40])
def test_settings(tmp_path, text, line, key, says):
    path = written(tmp_path, MODEL + text + "\n")
    message = refused(path)
    assert message.startswith(f"{path}:{line}: {key}")
    assert says in f"{message}\n"  # a line end in ``says`` is the end of the message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(("text", "key", "says"), MODELS, ids=lambda value: str(value)[:40])
def test_model_settings(tmp_path, text, key, says):
    path = written(tmp_path, f"name: a\nmodel:\n  {text}\n")
    message = refused(path)
    assert re.match(rf"{re.escape(str(path))}:\d+: {re.escape(key)}: ", message)
    assert says in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(("text", "says"), FILES, ids=lambda value: value[:40])
def test_files(tmp_path, text, says):
    path = written(tmp_path, text)
    assert f"{path}{says}" in refused(path)


def test_missing_file_and_directory(tmp_path):
    assert (
        refused(tmp_path / "none.yaml")
        == f"{tmp_path}/none.yaml: no such file; a build needs the path of a YAML configuration"
    )
    assert "is a directory; expected a YAML file in it" in refused(tmp_path)


def test_not_utf8(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_bytes(b"name: \xff\n")
    assert "is not UTF-8 text (byte 6)" in refused(path)


@pytest.mark.parametrize(("override", "says"), OVERRIDES, ids=lambda value: value[:40])
def test_overrides(tmp_path, override, says):
    assert refused(written(tmp_path, MODEL), (override,)).startswith(says)


def test_every_problem_is_listed(tmp_path):
    path = written(tmp_path, MODEL + "cache: {max_length: 0}\nquantize: {linear: x, colour: red}\n")
    lines = refused(path, ("check.steps=0",)).splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"{path}:3", f"{path}:4", f"{path}:4", "--set check.steps"]


def test_a_wrong_backend_does_not_hide_what_the_default_takes(tmp_path):
    path = written(tmp_path, MODEL + "quantize: {linear: x}\nlower: {backend: [y]}\n")
    linear, backend = refused(path).splitlines()
    assert linear.endswith("accepted: none, 8da4w, 8da8w")
    assert backend.startswith(f"{path}:4: lower.backend: ")


def test_an_inherited_mistake_points_into_the_base(tmp_path):
    (tmp_path / "base.yaml").write_text("model: {source: org/name}\ncache:\n  max_length: 0\n  placement: buffer\n")
    path = written(tmp_path, "extends: base.yaml\nname: a\ncache: {placement: buffer}\n")
    assert refused(path).startswith(f"{tmp_path}/base.yaml:3: cache.max_length: ")


def test_a_replaced_value_points_to_the_file_that_replaced_it(tmp_path):
    (tmp_path / "base.yaml").write_text("model: {source: org/name}\ncheck:\n  prompts: [x, y]\n")
    path = written(tmp_path, "extends: base.yaml\nname: a\ncheck:\n  prompts:\n    - ok\n    - 7\n")
    assert refused(path).startswith(f"{path}:6: check.prompts[1]: ")


def test_an_override_does_not_hide_where_a_section_is(tmp_path):
    path = written(tmp_path, "model: {source: org/name}\ncheck:\n  perplexity: {window: 4}\n")
    lines = refused(path, ("check.perplexity.tokens=5",)).splitlines()
    assert [line.split(": ")[:2] for line in lines] == [[f"{path}:1", "name"], [f"{path}:3", "check.perplexity.text"]]
