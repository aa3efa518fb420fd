"""The check over real programs: the right one passes, one with a wrong weight or a wrong mask does not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runners.check import FullLogits
from runners.check_command import command, command_eager
from runners.errors import CheckFailedError, UserError
from runners.goldens import GoldenPrompt, Goldens, GoldenText, Rounding, RoundingFigures, save, summarise
from runners.manifest import GOLDENS_NAME, Manifest
from runners.session import Session
from tests import packages
from tests.packages import CHUNK, L, Program, V, eager_logits, program_bytes, write_package

pytestmark = pytest.mark.export

STEPS = 6
LIMITS = {"min_equal_prompts": 1, "max_logit_difference": 1e-4, "max_mean_kl": 1e-6, "max_perplexity_ratio": 1.0001}


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(V, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy_logits(prompt: list[int]) -> torch.Tensor:
    tokens = list(prompt)
    for _ in range(STEPS - 1):
        tokens.append(int(eager_logits(tokens)[-1].argmax()))
    return eager_logits(tokens)[-STEPS:]


def golden(name: str, prompt: list[int]) -> GoldenPrompt:
    reference = summarise(greedy_logits(prompt))
    return GoldenPrompt(name, name, torch.tensor(prompt), reference.tokens, reference, reference)


def text() -> GoldenText:
    tokens = torch.tensor(ids(40, seed=9))
    parts = tokens.split(16)
    loss = sum(
        float(torch.nn.functional.cross_entropy(eager_logits(p.tolist())[:-1], p[1:], reduction="sum")) for p in parts
    )
    return GoldenText(tokens, 16, loss / 37, loss / 37)


def goldens() -> Goldens:
    """A short prompt, one of several calls of ``forward``, and one that fills the cache to its last position."""
    lengths = {"0": 3, "long": 2 * CHUNK + 3, "end": L - STEPS + 1}
    return Goldens(tuple(golden(name, ids(n, seed)) for seed, (name, n) in enumerate(lengths.items())), text())


@pytest.fixture(scope="module")
def right() -> bytes:
    return program_bytes("buffer", decode=True)


def package(folder: Path, program: bytes, recorded: Goldens | None = None, limits: dict | None = None) -> Path:
    folder.mkdir()
    save(recorded or goldens(), folder / GOLDENS_NAME)

    def configured(manifest: Manifest) -> Manifest:
        return manifest.model_copy(update={"config": {"check": {"quantized": limits or LIMITS, "unquantized": {}}}})

    return write_package(folder, Program(program, methods=("forward", "decode")), change=configured)


def test_the_right_program_passes(right: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command(package(tmp_path / "toy", right), threads=1, json=tmp_path / "check.json")
    report = json.loads((tmp_path / "check.json").read_text())
    assert report["passed"]
    assert report["repeatable"]
    assert [prompt["quantized"]["equal_steps"] for prompt in report["prompts"]] == [STEPS] * 3
    assert "check passed" in capsys.readouterr().out


def test_a_prompt_is_fed_as_an_apps_runner_feeds_it(right: bytes, tmp_path: Path, monkeypatch) -> None:
    lengths, feed = [], Session.feed
    monkeypatch.setattr("runners.session._PROMPT_CHUNK", 2)
    monkeypatch.setattr(Session, "feed", lambda self, ids: lengths.append(len(ids)) or feed(self, ids))
    command(package(tmp_path / "toy", right), threads=1)
    assert max(lengths) == CHUNK


def test_rounding_that_the_package_carries_is_shown_and_limits_it(right: bytes, tmp_path: Path, capsys) -> None:
    figures = RoundingFigures(
        equal_steps=5, max_margin=0.25, max_logit_difference=2.0, mean_logit_difference=0.5, mean_kl=1e-20
    )
    rounding = Rounding(recorded=figures, whole=figures.model_copy(update={"mean_kl": 1.0}))
    prompts = tuple(replace(prompt, rounding=rounding) for prompt in goldens().prompts)
    folder = package(tmp_path / "toy", right, Goldens(prompts, text()), limits={"max_kl_over_rounding": 1e-3})
    with pytest.raises(CheckFailedError, match=r"eager against itself in float64, at most 0\.001 allowed"):
        command(folder, threads=1, json=tmp_path / "check.json")
    report = json.loads((tmp_path / "check.json").read_text())
    assert [prompt["rounding"] for prompt in report["prompts"]] == [figures.model_dump()] * 3
    assert report["kl_over_rounding"] > 1e-3
    assert "(5/6)" in capsys.readouterr().out


def test_a_limit_over_rounding_without_a_run_in_float64_is_refused(right: bytes, tmp_path: Path) -> None:
    folder = package(tmp_path / "toy", right, limits={"max_kl_over_rounding": 2})
    with pytest.raises(UserError, match="max_kl_over_rounding is set, but the goldens hold no run in float64"):
        command(folder, threads=1)


class OneWeight(packages.Buffered):
    """One weight of 4,800 is off."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight[17, 3] += 0.5


def attend_to_all_but_the_first(x, where, cache, head):
    """The mask of ``packages._attend`` with the first position left out, except for the first token itself."""
    positions = torch.arange(L)[None, :]
    seen = (positions <= where[:, None]) & ((positions > 0) | (where[:, None] == 0))
    scores = x @ cache.transpose(1, 2)
    return head(torch.softmax(torch.where(seen, scores, torch.full_like(scores, -1e9)), -1) @ cache)


@pytest.mark.parametrize(("name", "wrong"), [("Buffered", OneWeight), ("_attend", attend_to_all_but_the_first)])
def test_a_wrong_weight_or_mask_fails(tmp_path: Path, monkeypatch, name: str, wrong) -> None:
    right_goldens = goldens()
    with monkeypatch.context() as patch:
        patch.setattr(packages, name, wrong)
        program = program_bytes("buffer", decode=True)
    with pytest.raises(CheckFailedError, match=r"max .Δlogit. against quantized is .* at most 0.0001"):
        command(package(tmp_path / "toy", program, right_goldens), threads=1, json=tmp_path / "check.json")
    assert not json.loads((tmp_path / "check.json").read_text())["passed"]


def test_package_without_goldens(right: bytes, tmp_path: Path) -> None:
    bare = write_package(tmp_path / "toy", Program(right))
    with pytest.raises(UserError, match="carries no goldens"):
        command(bare)


def test_damaged_goldens_are_refused_before_the_program_runs(right: bytes, tmp_path: Path) -> None:
    folder = package(tmp_path / "toy", right)
    (folder / GOLDENS_NAME).write_bytes((folder / GOLDENS_NAME).read_bytes()[:-100])
    with pytest.raises(UserError, match=GOLDENS_NAME):
        command(folder)


def test_prompt_that_does_not_fit(right: bytes, tmp_path: Path) -> None:
    too_long = golden("0", ids(3, seed=0))
    too_long = replace(too_long, prompt_ids=torch.tensor(ids(L, seed=0)))
    folder = package(tmp_path / "toy", right, Goldens((too_long,), text()))
    with pytest.raises(UserError, match=f"prompt 0 takes {L + STEPS - 1} cache positions, the program has {L}"):
        command(folder)


def test_report_that_cannot_be_written(right: bytes, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        command(package(tmp_path / "toy", right), json=tmp_path / "none" / "check.json")


def test_unknown_limit_in_the_configuration(right: bytes, tmp_path: Path) -> None:
    folder = package(tmp_path / "toy", right, limits={"max_margn": 1})
    with pytest.raises(UserError, match=r"check\.quantized\.max_margn"):
        command(folder)


def test_own_prompts_against_eager(right: bytes, tmp_path: Path) -> None:
    """The references come from a callback; the limit on perplexity does not apply, for no text is run."""
    asked = []

    def references(opened, prompts, steps):
        asked.append((opened.manifest.name, list(prompts), steps))
        logits = {text: greedy_logits(ids(5, seed=len(text))) for text in prompts}
        return Goldens(tuple(golden(p, ids(5, seed=len(p))) for p in prompts), None), FullLogits(logits, logits)

    command_eager(
        package(tmp_path / "toy", right), ["one", "three"], STEPS, references, threads=1, json=tmp_path / "x.json"
    )
    assert asked == [("toy", ["one", "three"], STEPS)]
    report = json.loads((tmp_path / "x.json").read_text())
    assert report["passed"]
    assert all(prompt["quantized"]["whole_vocabulary"] for prompt in report["prompts"])
