"""A program with three rows: each decodes as if it were alone, whatever the others do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from transformers import AutoModelForCausalLM

from pipeline.build import BuildOptions, build
from pipeline.config_reader import read
from pipeline.goldens import greedy_logits
from pipeline.stage_cache import StageCache
from pipeline.stages import Stages
from runners.batch import BatchSession
from runners.errors import UserError
from runners.package import Package, open_package
from runners.session import Session
from tests import tiny

pytestmark = pytest.mark.export

LENGTH = 32
PROMPTS = [[5, 6, 7], [9] * 9, [11]]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Package:
    """Built with its check: the check feeds one prompt after another, each through another row."""
    folder = tmp_path_factory.mktemp("batch")
    settings = {
        "name": "rows",
        "model": {"source": str(tiny_llama)},
        "cache": {"max_length": LENGTH, "batch_size": 3},
        "export": {"max_prefill_length": 4},
        "check": {"prompts": ["one", "two and two", "three"], "steps": 8, "quantized": {"min_equal_prompts": 1.0}},
        "package": {"directory": str(folder / "dist")},
    }
    (folder / "rows.yaml").write_text(yaml.safe_dump(settings))
    built = build(read(folder / "rows.yaml"), BuildOptions(), Stages(Console(quiet=True)), StageCache(None))
    return open_package(built.path)


@pytest.fixture(scope="module")
def alone(tiny_llama: Path) -> list[torch.Tensor]:
    """Eager greedy logits of each prompt by itself, float32 [12, V]."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    return [greedy_logits(model, torch.tensor(ids), 12) for ids in PROMPTS]


def test_the_manifest_tells_the_rows_and_a_position_a_token(package: Package) -> None:
    tokens, position = package.manifest.methods["forward"].inputs
    assert tokens.shape == position.shape == [3, 4]
    assert tokens.min_shape == position.min_shape == [3, 1]
    assert package.manifest.cache is not None
    assert package.manifest.cache.attention == "portable"


def test_prompts_of_three_lengths_decode_as_each_alone(package: Package, alone: list[torch.Tensor]) -> None:
    session = BatchSession(package, threads=1)
    logits = session.prefill(PROMPTS).clone()
    for step in range(12):
        wanted = torch.stack([rows[step] for rows in alone])
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)
        logits = session.step(wanted.argmax(-1).tolist()).clone()
    assert session.lengths == (15, 21, 13)


def test_a_second_batch_in_another_order_is_not_touched_by_the_first(
    package: Package, alone: list[torch.Tensor]
) -> None:
    session = BatchSession(package, threads=1)
    session.generate(PROMPTS, lambda logits: int(logits.argmax()), eos_ids=(), max_new_tokens=LENGTH)
    order = [2, 0, 1]
    found = session.generate(
        [PROMPTS[i] for i in order], lambda logits: int(logits.argmax()), eos_ids=(), max_new_tokens=12
    )
    assert found == [alone[i].argmax(-1).tolist() for i in order]


def test_a_row_ends_at_its_end_of_sequence_token_and_the_others_go_on(
    package: Package, alone: list[torch.Tensor]
) -> None:
    tokens = [rows.argmax(-1).tolist() for rows in alone]
    end = tokens[0][4]
    found = BatchSession(package, threads=1).generate(
        PROMPTS, lambda logits: int(logits.argmax()), eos_ids=(end,), max_new_tokens=12
    )
    assert found == [row[: row.index(end)] if end in row else row for row in tokens]
    assert len(found[0]) == tokens[0].index(end) < 12


def test_a_full_row_stops_and_every_token_up_to_the_last_position_is_right(package: Package, tiny_llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    prompts = [[7] * 30, [8, 9]]
    found = BatchSession(package, threads=1).generate(
        prompts, lambda logits: int(logits.argmax()), eos_ids=(), max_new_tokens=100
    )
    for prompt, row in zip(prompts, found, strict=True):
        count = LENGTH - len(prompt) + 1
        assert row == greedy_logits(model, torch.tensor(prompt), count).argmax(-1).tolist()


def test_one_sequence_through_any_row_is_the_same(package: Package, alone: list[torch.Tensor]) -> None:
    session = Session.open(package, threads=1)
    for _ in range(4):
        session.reset()
        found = [session.prefill(PROMPTS[1]).clone()]
        for wanted in alone[1][:-1]:
            found.append(session.step(int(wanted.argmax())).clone())
        torch.testing.assert_close(torch.stack(found), alone[1], atol=1e-4, rtol=0)


def test_what_does_not_fit_is_refused(package: Package, tmp_path: Path) -> None:
    session = BatchSession(package, threads=1)
    with pytest.raises(UserError, match="4 prompts for a program of 3 rows"):
        session.prefill([[1]] * 4)
    with pytest.raises(UserError, match="prompt 1 has 33 tokens"):
        session.prefill([[1], [1] * 33])
    session.prefill([[1] * LENGTH])
    with pytest.raises(UserError, match="the context of row 0 is full"):
        session.step([1])


@pytest.mark.parametrize(
    ("model", "reason"),
    [("window", "layers with a window or a state"), ("custom", "one position for all rows")],
)
def test_a_family_that_cannot_is_refused(model: str, reason: str) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    from pipeline.artifacts import Quantized
    from pipeline.config import CacheSettings, ExportSettings
    from pipeline.register import register

    config = MistralConfig(vocab_size=60, hidden_size=32, intermediate_size=32, num_hidden_layers=1, sliding_window=8)
    windowed = MistralForCausalLM(config).eval().requires_grad_(False)
    chosen, attention = (windowed, "auto") if model == "window" else (tiny.llama(), "custom")
    with pytest.raises(UserError, match=reason):
        register(Quantized(chosen, {}), CacheSettings(max_length=8, batch_size=2), ExportSettings(attention=attention))
