"""The zoo's own parts: a proof refuses what it should, results keep all they hold, the page says what failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.zoo import encoders, families, greedy, results, text_generation
from tests.zoo.build import one_line
from tests.zoo.registry import ROWS
from tests.zoo.row import Cannot, Family, Result, Row
from tests.zoo.table import page
from tests.zoo.test_zoo import KnownLimitError, raise_known

PROMPT = [5, 6, 7]
LLAMA = next(family for family in families.FAMILIES if family.name == "llama")
BERT = encoders.FAMILIES[0]
CANNOT = Cannot("lower", "no kernel", "The runtime has none.")
WORKS = Result(
    "text-generation",
    "LlamaForCausalLM",
    True,
    True,
    True,
    ("full",),
    "custom",
    48,
    {"forward": 5},
    {"forward": {"aten::a": 2}},
)


class Pretender:
    """Stands for a session whose program is eager PyTorch, changed by a function of the step and the logits."""

    def __init__(self, change: Callable[[int, torch.Tensor], torch.Tensor], model: PreTrainedModel) -> None:
        self._eager, self._change, self._step = text_generation.Eager(model), change, -1

    def prefill(self, ids: Sequence[int]) -> torch.Tensor:
        self._step += 1
        return self._change(self._step, self._eager.feed(list(ids)))


def decoded(change: Callable[[int, torch.Tensor], torch.Tensor], model: PreTrainedModel, steps: int) -> torch.Tensor:
    return greedy.decoded(Pretender(change, model), text_generation.Eager(model), PROMPT, steps)


def test_a_program_that_says_the_same_is_accepted() -> None:
    said = decoded(lambda step, logits: logits, LLAMA.model(), 6)
    assert said.shape == (7, 64)


def test_a_program_that_differs_at_a_late_step_is_refused() -> None:
    with pytest.raises(AssertionError, match="at step 5, logits differ"):
        decoded(lambda step, logits: logits + (0.01 if step == 5 else 0.0) * torch.eye(64)[3], LLAMA.model(), 6)


def test_a_choice_that_is_a_tie_proves_nothing() -> None:
    model = LLAMA.model()
    model.lm_head.weight[32:] = model.lm_head.weight[:32]  # every token has a twin
    with pytest.raises(AssertionError, match="at step 0, eager's choice is a tie"):
        decoded(lambda step, logits: logits, model, 1)


class PretendingCaller:
    """Stands for a loaded program of a text encoder: eager PyTorch, changed by a function of input and output."""

    def __init__(self, change: Callable[[dict[str, torch.Tensor], torch.Tensor], torch.Tensor]) -> None:
        self._model, self._change = BERT.model(), change

    def call(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        output = self._model(input_ids=inputs["tokens"], attention_mask=inputs["attention_mask"]).last_hidden_state
        return {"hidden": self._change(inputs, output)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda inputs, output: output, None),
        (lambda inputs, output: output + 1e-3 * (output.shape[1] == 5), "of 5 tokens, the output differs by"),
        (lambda inputs, output: output + 1e-3 * (1 - inputs["attention_mask"].min()), "of 17 tokens, padded to 40, "),
        (lambda inputs, output: output + 1e-6 * torch.rand(1), "a fresh load says something else"),
        (lambda inputs, output: BERT.model()(inputs["tokens"]).last_hidden_state, "of 17 tokens, padded to 40, "),
    ],
)
def test_texts_are_held_against_eager_with_padding_and_without(change, message, monkeypatch) -> None:
    monkeypatch.setattr(encoders, "Caller", lambda package, program: PretendingCaller(change))
    monkeypatch.setattr(encoders, "Program", lambda package: None)
    monkeypatch.setattr(encoders, "max_tokens", lambda package: 40)
    if message is None:
        return encoders.prove_text(BERT.model(), None)
    with pytest.raises(AssertionError, match=message):
        encoders.prove_text(BERT.model(), None)


def test_only_the_named_error_is_a_known_limit() -> None:
    raise_known(None, WORKS)
    raise_known(CANNOT, WORKS)  # the xfail of its row is strict: it fails when nothing is raised
    with pytest.raises(KnownLimitError):
        raise_known(CANNOT, replace(WORKS, decodes=False, error="RuntimeError: no kernel of that name"))
    with pytest.raises(AssertionError, match="another"):
        raise_known(CANNOT, replace(WORKS, decodes=False, error="RuntimeError: another error"))


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    found = {"llama-buffer": WORKS, "llama-io": Result("text-generation", error='x"y|z')}
    results.write(found, tmp_path / "results.json")
    assert results.read(tmp_path / "results.json") == found


def test_the_page_has_a_line_a_row_and_names_what_fails() -> None:
    family = Family("toy", LLAMA.config, placements=("io",), cannot=CANNOT)
    rows = [Row(LLAMA, "buffer"), Row(family, "io")]
    found = {"llama-buffer": WORKS, "toy-io": Result("text-generation", exports=True, error="RuntimeError: no kernel")}
    text = page(rows, found)
    assert "| llama | buffer | yes | yes | yes | full | custom | 48 | 5 | 2 a |" in text
    assert "| toy | io | yes | **no** | **no** |" in text
    assert "**toy-io**: The runtime has none. Error: `RuntimeError: no kernel`" in text


def test_the_page_has_what_xnnpack_leaves_of_every_method() -> None:
    family = Family("toy", LLAMA.config, task="text2text", placements=("buffer",))
    found = replace(WORKS, delegates={"decode": 3, "encode": 1}, undelegated={"decode": {"aten::a": 2}, "encode": {}})
    text = page([Row(family, "buffer")], {"toy-buffer": found})
    assert "| **decode** 3<br>**encode** 1 | **decode** 2 a<br>**encode** none |" in text


def test_rows_without_a_cache_are_told_apart_by_their_task() -> None:
    assert len({row.key for row in ROWS}) == len(ROWS)
    assert {"bert-embedding", "bert-fill-mask"} <= {row.key for row in ROWS}


def test_a_long_error_becomes_one_line() -> None:
    text = one_line(ValueError("a\n  b" * 500))
    assert text.startswith("ValueError: a b") and len(text) < 500 and text.endswith("…")
