"""Pooling of hidden states, and the files that say which."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pipeline.pooling import read_pooling
from runners.errors import UserError
from runners.pooling import pool
from runners.preprocessing import Pooling

# Three tokens and one place of padding, which must not show.
HIDDEN = torch.tensor([[[1.0, -2.0], [3.0, 4.0], [5.0, -8.0], [100.0, 100.0]]])
MASK = torch.tensor([[1, 1, 1, 0]])
EXPECTED = {"mean": [3.0, -2.0], "cls": [1.0, -2.0], "max": [5.0, 4.0]}


@pytest.mark.parametrize("mode", EXPECTED)
def test_a_small_case_by_hand(mode):
    assert pool(HIDDEN, MASK, Pooling(mode=mode, normalize=False)).tolist() == [EXPECTED[mode]]
    length = (EXPECTED[mode][0] ** 2 + EXPECTED[mode][1] ** 2) ** 0.5
    normalized = pool(HIDDEN, MASK, Pooling(mode=mode, normalize=True))
    torch.testing.assert_close(normalized, torch.tensor([EXPECTED[mode]]) / length)


@pytest.mark.parametrize("mode", EXPECTED)
def test_padding_before_the_text_counts_as_little(mode):
    settings = Pooling(mode=mode, normalize=False)
    before = torch.cat([HIDDEN[:, 3:], HIDDEN[:, :3]], dim=1)
    assert pool(before, torch.tensor([[0, 1, 1, 1]]), settings).tolist() == [EXPECTED[mode]]


@pytest.mark.parametrize("mode", EXPECTED)
def test_not_even_nan_leaks_from_the_padding(mode):
    hidden = HIDDEN.clone()
    hidden[0, 3] = float("nan")
    assert pool(hidden, MASK.bool(), Pooling(mode=mode, normalize=False)).tolist() == [EXPECTED[mode]]


HIDDENS = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 5)),
    elements=st.floats(-100, 100, width=32),
)


@given(HIDDENS, st.data(), st.sampled_from(["mean", "cls", "max"]))
def test_a_row_does_not_depend_on_its_padding_or_its_neighbours(values, data, mode):
    hidden = torch.from_numpy(values)
    lengths = [data.draw(st.integers(1, hidden.shape[1])) for _ in range(len(hidden))]
    mask = torch.tensor([[1] * n + [0] * (hidden.shape[1] - n) for n in lengths])
    result = pool(hidden, mask, Pooling(mode=mode, normalize=False))
    for row, n in enumerate(lengths):
        tokens = values[row, :n].astype(np.float64)
        expected = {"mean": tokens.mean(axis=0), "cls": tokens[0], "max": tokens.max(axis=0)}[mode]
        np.testing.assert_allclose(result[row].numpy(), expected, atol=1e-4)


@given(HIDDENS, st.sampled_from(["mean", "cls", "max"]))
def test_normalised_vectors_have_length_one(values, mode):
    hidden = torch.from_numpy(values)
    mask = torch.ones(hidden.shape[:2], dtype=torch.int64)
    plain = pool(hidden, mask, Pooling(mode=mode, normalize=False)).norm(dim=1)
    lengths = pool(hidden, mask, Pooling(mode=mode, normalize=True)).norm(dim=1)
    torch.testing.assert_close(lengths[plain > 1e-6], torch.ones_like(lengths[plain > 1e-6]))


def test_what_cannot_be_pooled_is_refused():
    mean = Pooling(mode="mean", normalize=False)
    with pytest.raises(UserError, match="no tokens"):
        pool(HIDDEN, torch.zeros(1, 4, dtype=torch.int64), mean)
    with pytest.raises(UserError, match=r"\[1, 4, 2\] and \[1, 3\]"):
        pool(HIDDEN, MASK[:, :3], mean)
    with pytest.raises(UserError, match=r"hidden states \[B, S, D\]"):
        pool(HIDDEN[0], MASK[0], mean)


OLD, NEW = "sentence_transformers.models.", "sentence_transformers.sentence_transformer.modules.pooling."


def model_folder(tmp_path, *, kinds=(OLD + "Transformer", OLD + "Pooling"), pooling=None, path="1_Pooling"):
    modules = [{"idx": i, "name": str(i), "path": path if i == 1 else "", "type": kind} for i, kind in enumerate(kinds)]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    folder = tmp_path / path
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"word_embedding_dimension": 8} if pooling is None else pooling))
    return tmp_path


# An old file has a switch for each mode, a new one names the mode.
CONFIGS = {
    "old mean": ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
    "old cls": ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
    "old max": ({"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": False}, "max"),
    "no switch": ({"pooling_mode_mean_tokens": False}, "mean"),
    "new": ({"embedding_dimension": 8, "pooling_mode": "cls", "include_prompt": True}, "cls"),
    "new list": ({"pooling_mode": ["max"]}, "max"),
}


@pytest.mark.parametrize(("config", "mode"), CONFIGS.values(), ids=CONFIGS)
def test_the_files_of_sentence_transformers_are_read(tmp_path, config, mode):
    folder = model_folder(tmp_path, pooling=config)
    assert read_pooling(folder) == Pooling(mode=mode, normalize=False)
    (folder / "modules.json").unlink()
    assert read_pooling(folder) == Pooling(mode=mode, normalize=False)


def test_a_module_that_normalises_counts(tmp_path):
    kinds = (OLD + "Transformer", NEW + "Pooling", OLD + "Normalize")
    folder = model_folder(tmp_path, kinds=kinds, pooling={"pooling_mode": "cls"}, path="pool")
    assert read_pooling(folder) == Pooling(mode="cls", normalize=True)


def test_a_plain_encoder_gets_the_mean(tmp_path):
    assert read_pooling(tmp_path) == Pooling(mode="mean", normalize=False)


UNSUPPORTED = {
    "two modes": ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "cls [+] mean"),
    "last token": ({"pooling_mode": "lasttoken"}, "lasttoken is not supported; supported is one of mean, cls, max"),
    "weighted": ({"pooling_mode_weightedmean_tokens": True}, "weightedmean"),
    "no object": ([1], "expected a JSON object, found list"),
}


@pytest.mark.parametrize(("config", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_other_modes_are_refused_by_name(tmp_path, config, message):
    with pytest.raises(UserError, match=rf"1_Pooling/config\.json: .*{message}"):
        read_pooling(model_folder(tmp_path, pooling=config))


def test_other_modules_are_refused_by_name(tmp_path):
    kinds = (OLD + "Transformer", OLD + "Pooling", OLD + "Dense")
    with pytest.raises(UserError, match=r"modules\.json: the modules Transformer, Pooling, Dense are not supported"):
        read_pooling(model_folder(tmp_path, kinds=kinds))


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not readable as JSON"), ("{}", "expected a list"), ("[1]", "with 'type' as text"), ("[]", r"\(none\)")],
)
def test_damaged_module_lists_are_named(tmp_path, text, message):
    folder = model_folder(tmp_path)
    (folder / "modules.json").write_text(text)
    with pytest.raises(UserError, match=rf"modules\.json: .*{message}"):
        read_pooling(folder)


def test_a_path_out_of_the_folder_is_refused(tmp_path):
    (tmp_path / "model").mkdir()
    folder = model_folder(tmp_path / "model", path="../elsewhere")
    with pytest.raises(UserError, match="leads out of the model's folder"):
        read_pooling(folder)
