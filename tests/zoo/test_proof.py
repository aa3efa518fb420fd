"""The zoo's own parts: a proof refuses what it should, results keep all they hold, the page says what failed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.zoo import families, results, text_generation
from tests.zoo.build import one_line
from tests.zoo.row import Cannot, Family, Result, Row
from tests.zoo.table import page
from tests.zoo.test_zoo import KnownLimitError, raise_known

PROMPT = [5, 6, 7]
LLAMA = next(family for family in families.FAMILIES if family.name == "llama")
CANNOT = Cannot("lower", "no kernel", "The runtime has none.")
WORKS = Result(
    "text-generation", "LlamaForCausalLM", True, True, True, ("full",), "custom", 48, {"forward": 5}, {"aten::a": 2}
)


class Pretender:
    """Stands for a session whose program is eager PyTorch, changed by a function of the step and the logits."""

    def __init__(self, change, model: PreTrainedModel | None = None) -> None:
        self._eager, self._change, self._step = text_generation._Eager(model or LLAMA.model()), change, -1

    def prefill(self, ids: list[int]) -> torch.Tensor:
        self._step += 1
        return self._change(self._step, self._eager.feed(ids))


def test_a_program_that_says_the_same_is_accepted() -> None:
    said = text_generation._decoded(Pretender(lambda step, logits: logits), LLAMA.model(), PROMPT, 6)
    assert said.shape == (7, 64)


def test_a_program_that_differs_at_a_late_step_is_refused() -> None:
    session = Pretender(lambda step, logits: logits + (0.01 if step == 5 else 0.0) * torch.eye(64)[3])
    with pytest.raises(AssertionError, match="at step 5, logits differ"):
        text_generation._decoded(session, LLAMA.model(), PROMPT, 6)


def test_a_choice_that_is_a_tie_proves_nothing() -> None:
    model = LLAMA.model()
    model.lm_head.weight[32:] = model.lm_head.weight[:32]  # every token has a twin
    with pytest.raises(AssertionError, match="at step 0, eager's choice is a tie"):
        text_generation._decoded(Pretender(lambda step, logits: logits, model), model, PROMPT, 1)


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
    assert "| toy |  | yes | **no** | **no** |" in text
    assert "**toy-io**: The runtime has none. Error: `RuntimeError: no kernel`" in text


def test_a_long_error_becomes_one_line() -> None:
    text = one_line(ValueError("a\n  b" * 500))
    assert text.startswith("ValueError: a b") and len(text) < 500 and text.endswith("…")
