"""Whisper models of CTranslate2: read, converted and loaded as the model they were written from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from pipeline.sources import ctranslate2, fetch
from pipeline.sources.fetched import folder_digest
from runners.errors import UserError
from tests import whisper_files
from tests.wheels import only_index, write


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PTELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def original() -> WhisperForConditionalGeneration:
    return whisper_files.model()


@pytest.fixture
def folder(tmp_path: Path, original: WhisperForConditionalGeneration) -> Path:
    return whisper_files.save_folder(tmp_path / "whisper", original)


def rewrite(folder: Path, content: whisper_files.Variables, **options: object) -> None:
    (folder / "model.bin").write_bytes(whisper_files.binary(content, **options))


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        fetch(str(folder))
    return str(caught.value)


def test_the_model_is_the_one_it_was_written_from(folder, original):
    fetched = fetch(str(folder))
    assert (fetched.kind, fetched.has_tokenizer) == ("folder", True)
    loaded, info = WhisperForConditionalGeneration.from_pretrained(
        fetched.path, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    expected = original.state_dict()
    found = loaded.state_dict()
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    inputs = {"input_features": torch.randn(1, 4, 20), "decoder_input_ids": torch.tensor([[257, 263]])}
    assert torch.equal(loaded.eval()(**inputs).logits, original(**inputs).logits)


def test_the_files_beside_the_weights(folder):
    path = fetch(str(folder)).path
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert type(tokenizer).__name__ == "WhisperTokenizer"
    assert tokenizer.decode(tokenizer("A word.").input_ids, skip_special_tokens=True) == "A word."
    extractor = WhisperFeatureExtractor.from_pretrained(path)
    assert (extractor.feature_size, extractor.sampling_rate) == (4, 16_000)
    generation = GenerationConfig.from_pretrained(path)
    assert generation.suppress_tokens == [1, 2] and generation.begin_suppress_tokens == [3]
    assert (generation.eos_token_id, generation.decoder_start_token_id, generation.max_length) == (256, 257, 14)
    assert generation.is_multilingual is False and not hasattr(generation, "lang_to_id")


def test_a_vocabulary_of_all_languages(tmp_path):
    folder = whisper_files.save_folder(tmp_path / "whisper", whisper_files.model(vocabulary=51_865))
    generation = GenerationConfig.from_pretrained(fetch(str(folder)).path)
    assert generation.is_multilingual is True
    assert generation.lang_to_id == {"<|en|>": 258, "<|de|>": 259}
    assert generation.task_to_id == {"translate": 260, "transcribe": 261}


def test_own_preprocessor_config_wins(folder):
    (folder / "preprocessor_config.json").write_text('{"feature_size": 4, "n_fft": 401}')
    assert json.loads((fetch(str(folder)).path / "preprocessor_config.json").read_bytes())["n_fft"] == 401


def test_converted_once_and_keyed_by_content(folder, tmp_path, monkeypatch):
    first = fetch(str(folder))
    assert first.path.is_relative_to(tmp_path / "cache" / "ctranslate2")
    monkeypatch.setattr(ctranslate2, "read", lambda _: pytest.fail("converted again"))
    assert fetch(str(folder)) == first
    elsewhere = Path(shutil.copytree(folder, tmp_path / "there" / "whisper"))
    assert fetch(str(elsewhere)) == first
    monkeypatch.undo()
    monkeypatch.setenv("PTELINE_CACHE", str(tmp_path / "cache"))
    (folder / "config.json").write_text("{}")
    other = fetch(str(folder))
    assert other.digest != first.digest and other.path != first.path


def test_in_a_wheel(folder, tmp_path, cache, monkeypatch):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write(wheels, "tiny-ears", "1", {f"tiny_ears/m/{path.name}": path.read_bytes() for path in folder.iterdir()})
    only_index(wheels, cache, monkeypatch)
    digest = folder_digest(folder.iterdir(), folder)
    fetched = fetch("pypi:tiny-ears==1/tiny_ears/m/", sha256=digest)
    assert fetched.digest == digest
    assert (fetched.path / "model.safetensors").is_file()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_float_types(folder, original, dtype):
    content = whisper_files.variables(original)
    name = "encoder/conv1/bias"
    single = content[name].astype(np.float32)
    upper = (single.view(np.uint32) >> 16).astype(np.uint16)
    content[name] = single if dtype == "float32" else upper
    rewrite(folder, content, types={name: dtype})
    loaded = WhisperForConditionalGeneration.from_pretrained(fetch(str(folder)).path, dtype=torch.float32)
    bias = original.model.encoder.conv1.bias
    rounded = torch.from_numpy((upper.astype(np.uint32) << 16).view(np.float32))
    assert torch.equal(loaded.model.encoder.conv1.bias, bias if dtype == "float32" else rounded)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("encoder/conv1/bias", None, "lacks 1 variables of a Whisper model: encoder/conv1/bias"),
        ("decoder/layer_1/attention/linear_2/weight", None, "lacks 1 variables"),
        ("encoder/layer_0/ffn/linear_0/weight", None, "encoder/layer_0/ffn/linear_0/weight is missing"),
        ("decoder/num_heads", None, "decoder/num_heads is missing"),
        ("decoder/rotary_dim", np.int16(4), "1 variables have no place in a Whisper model: decoder/rotary_dim"),
        ("decoder/projection/weight", np.zeros((280, 8), np.float16), "have no place"),
        ("decoder/activation", np.int8(0), "decoder/activation is 0, and Whisper in transformers has 3 built in"),
        ("decoder/pre_norm", np.int8(0), "decoder/pre_norm is 0"),
        ("encoder/conv2/bias", np.zeros(9, np.float16), "is float16 [9]; expected float [8]"),
        ("encoder/layer_0/ffn/linear_1/weight", np.zeros((8, 12), np.int8), "is int8 [8, 12]; expected float [8, 12]"),
        ("encoder/layer_0/self_attention/linear_0/bias", np.ones(24, np.float16), "has a bias for keys"),
        ("decoder/layer_0/attention/linear_1/bias", np.ones(16, np.float16), "has a bias for keys"),
        ("encoder/num_heads", np.zeros(2, np.int16), "encoder/num_heads has shape [2]"),
    ],
    ids=lambda value: value if isinstance(value, str) and "/" in value else "",
)
def test_variables_that_do_not_fit(folder, original, cache, name, value, says):
    content = whisper_files.variables(original)
    if value is None:
        del content[name]
    else:
        content[name] = value
    rewrite(folder, content)
    message = refused(folder)
    assert says in message and "model.bin" in message
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_other_models_and_layouts(folder, original):
    content = whisper_files.variables(original)
    rewrite(folder, content, spec="TransformerSpec")
    assert "a CTranslate2 TransformerSpec; expected WhisperSpec" in refused(folder)
    rewrite(folder, content, version=5)
    assert "CTranslate2 binary version 5, expected 6" in refused(folder)
    rewrite(folder, content, aliases={})
    assert "expected only decoder/projection/weight for decoder/embeddings/weight" in refused(folder)


@pytest.mark.parametrize("share", [0.003, 0.01, 0.3, 0.9, 0.9999])
def test_truncated(folder, share):
    path = folder / "model.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    assert f"{path}: truncated or damaged" in refused(folder)


def test_damaged(folder, original):
    path = folder / "model.bin"
    whole = path.read_bytes()
    path.write_bytes(whole + b"x")
    assert "1 bytes follow its last alias" in refused(folder)
    at = whole.index(b"encoder/num_heads\0") + len(b"encoder/num_heads\0")
    for place, byte in ((at + 1, 99), (at + 2, 4)):  # an unknown type; two bytes that say they are four
        broken = bytearray(whole)
        broken[place] = byte
        path.write_bytes(broken)
        assert "variable 'encoder/num_heads' has type" in refused(folder)


def test_tokenizer_that_is_missing_or_another(folder):
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_bytes())
    kept = [entry for entry in tokenizer["added_tokens"] if entry["content"] != "<|notimestamps|>"]
    path.write_text(json.dumps({**tokenizer, "added_tokens": kept}))
    assert "lacks Whisper's special tokens <|notimestamps|>" in refused(folder)
    tokenizer["added_tokens"][0]["id"] = 280
    path.write_text(json.dumps(tokenizer))
    assert "<|endoftext|>" in refused(folder)
    path.unlink()
    assert f"{folder} has no tokenizer.json" in refused(folder)


def test_only_a_ctranslate2_file_is_taken_for_one(tmp_path):
    path = tmp_path / "model.bin"
    for content in (b"", b"\x06\0\0\0", b"PK\x03\x04" + b"x" * 200, b"\x80\x02}q\0.", b"\x06\0\0\0\x05\0abcd\0"):
        path.write_bytes(content)
        assert not ctranslate2.is_model(path)
    (tmp_path / "config.json").write_text("{}")
    assert "the only weights here are pickled" in refused(tmp_path)
    path.write_bytes(whisper_files.binary({}))
    assert ctranslate2.is_model(path)
