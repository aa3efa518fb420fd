"""The check: a right program passes, each kind of wrong one fails with the figure, the limit and the prompt."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from pipeline.config import Limits as ConfigLimits
from pipeline.config import QuantizedLimits as ConfigQuantizedLimits
from runners.check import FullLogits, repeats
from runners.check import check as check_repeatable
from runners.check_render import show
from runners.check_report import (
    CheckReport,
    Limits,
    QuantizedLimits,
    limits_from_config,
    quantized_limits_from_config,
    read_report,
    write_report,
)
from runners.errors import UserError
from runners.goldens import GoldenPrompt, Goldens, GoldenText, Rounding, RoundingFigures, summarise
from tests.table_model import STEPS, VOCABULARY, StaleModel, TableModel, along, check, nll, table

STRICT = QuantizedLimits(
    min_equal_prompts=1,
    max_margin=1e-6,
    max_logit_difference=1e-6,
    max_mean_kl=1e-6,
    max_perplexity_ratio=1.000001,
)
OPEN = QuantizedLimits()


PROMPTS = {"0": [3, 4, 5], "1": [100, 7], "long": list(range(50, 90))}
QUANTIZED, SOURCE = TableModel(table(0)), TableModel(table(0) + 0.01 * table(1))


@pytest.fixture(scope="module")
def recorded() -> tuple[Goldens, FullLogits]:
    prompts, full = [], FullLogits({}, {})
    for name, ids in PROMPTS.items():
        full.quantized[name] = along(QUANTIZED, ids)
        forced = full.quantized[name].argmax(-1)
        full.unquantized[name] = along(SOURCE, ids, forced.tolist())
        both = summarise(full.quantized[name]), summarise(full.unquantized[name])
        prompts.append(GoldenPrompt(name, f"prompt {name}", torch.tensor(ids), forced, *both))
    ids = torch.randint(0, VOCABULARY, (30,), generator=torch.Generator().manual_seed(5))
    text = GoldenText(ids, 8, nll(QUANTIZED, ids, 8), nll(SOURCE, ids, 8))
    return Goldens(tuple(prompts), text), full


@pytest.fixture
def goldens(recorded: tuple[Goldens, FullLogits]) -> Goldens:
    return recorded[0]


def rules(report) -> list[tuple[str, str, str | None]]:
    return [(found.against, found.rule, found.prompt) for found in report.violations]


def test_the_right_program_passes(goldens: Goldens) -> None:
    report = check(TableModel(table(0)), goldens, STRICT, OPEN)
    assert report.passed
    assert report.violations == ()
    assert [(prompt.name, prompt.quantized.equal_steps) for prompt in report.prompts] == [(n, STEPS) for n in PROMPTS]
    assert report.perplexity.scored_tokens == 26  # 3 windows of 8 and one of 6, less one token each
    assert report.perplexity.ratio("quantized") == pytest.approx(1, abs=1e-6)
    assert report.perplexity.ratio("unquantized") != pytest.approx(1, abs=1e-6)


def test_without_limits_a_wrong_program_is_reported_not_failed(goldens: Goldens) -> None:
    report = check(TableModel(table(3)), goldens, OPEN, OPEN)
    assert report.passed
    assert not report.prompts[0].quantized.tokens_equal


def test_another_program_breaks_every_limit(goldens: Goldens) -> None:
    report = check(TableModel(table(3)), goldens, STRICT, OPEN)
    assert not report.passed
    per_prompt = [("quantized", rule, name) for name in PROMPTS for rule in sorted_rules()]
    assert rules(report)[: len(per_prompt)] == per_prompt
    assert rules(report)[len(per_prompt) :][0] == ("quantized", "min_equal_prompts", None)


def sorted_rules() -> list[str]:
    return ["max_margin", "max_logit_difference", "max_mean_kl"]


def test_limits_against_the_unquantized_reference(goldens: Goldens) -> None:
    report = check(TableModel(table(0)), goldens, OPEN, Limits(max_logit_difference=1e-3))
    assert {found.against for found in report.violations} == {"unquantized"}
    worst = max(prompt.unquantized.max_logit_difference for prompt in report.prompts)
    assert max(found.value for found in report.violations) == worst > 1e-3


def test_one_corrupted_logit_fails_on_its_prompt_alone(goldens: Goldens) -> None:
    wrong = table(0)
    row = sum((i + 1) * token for i, token in enumerate(PROMPTS["1"])) % 97
    wrong[row, int(goldens.prompts[1].quantized.top_ids[0, 3])] += 0.25  # not enough to change the choice
    report = check(TableModel(wrong), goldens, QuantizedLimits(max_logit_difference=0.1), OPEN)
    assert rules(report) == [("quantized", "max_logit_difference", "1")]
    assert report.violations[0].value == pytest.approx(0.25)
    assert report.violations[0].limit == 0.1
    assert "prompt 1: max |Δlogit| against quantized is 0.25, at most 0.1" in report.violations[0].message
    assert report.prompts[1].quantized.tokens_equal


def test_a_wrong_choice_is_reported_with_its_margin(goldens: Goldens) -> None:
    wrong = table(0)
    row = sum((i + 1) * token for i, token in enumerate(PROMPTS["0"])) % 97
    reference = goldens.prompts[0].quantized
    second = int(reference.top_ids[0, 1])
    wrong[row, second] = reference.top_logits[0, 0] + 1
    report = check(TableModel(wrong), goldens, QuantizedLimits(max_margin=1e-9), OPEN)
    first = report.prompts[0].quantized.differences[0]
    assert (first.step, first.wanted, first.got) == (0, int(reference.tokens[0]), second)
    assert first.margin == pytest.approx(float(reference.top_logits[0, 0] - reference.top_logits[0, 1]))
    assert not first.margin_is_lower_bound
    assert rules(report) == [("quantized", "max_margin", "0")]


def test_a_choice_beyond_the_recorded_logits_says_so(goldens: Goldens) -> None:
    wrong = table(0)
    row = sum((i + 1) * token for i, token in enumerate(PROMPTS["0"])) % 97
    wrong[row, int(wrong[row].argmin())] = 99
    first = check(TableModel(wrong), goldens, OPEN, OPEN).prompts[0].quantized.differences[0]
    logits = goldens.prompts[0].quantized.top_logits[0]
    assert first.margin_is_lower_bound
    assert first.margin == pytest.approx(float(logits[0] - logits[-1]))


def test_share_of_equal_prompts(goldens: Goldens) -> None:
    wrong = table(0)
    row = sum((i + 1) * token for i, token in enumerate(PROMPTS["long"])) % 97
    wrong[row, 0] = 99
    assert check(TableModel(wrong), goldens, QuantizedLimits(min_equal_prompts=0.6), OPEN).passed
    report = check(TableModel(wrong), goldens, QuantizedLimits(min_equal_prompts=0.7), OPEN)
    assert rules(report) == [("quantized", "min_equal_prompts", None)]
    assert report.violations[0].value == pytest.approx(2 / 3)
    assert "not on: long" in report.violations[0].message


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_fail_without_any_limit(goldens: Goldens, bad: float) -> None:
    wrong = table(0)
    row = sum((i + 1) * token for i, token in enumerate(PROMPTS["0"])) % 97
    wrong[row, 5] = bad
    report = check(TableModel(wrong), goldens, OPEN, OPEN)
    assert ("itself", "finite", "0") in rules(report)


def test_nan_passes_no_limit(goldens: Goldens) -> None:
    report = check(TableModel(table(0) * math.nan), goldens, STRICT, OPEN)
    broken = {rule for against, rule, _ in rules(report) if against == "quantized"}
    assert {"max_logit_difference", "max_mean_kl", "max_perplexity_ratio", "min_equal_prompts"} <= broken


def test_a_stale_cache_fails_without_any_limit(goldens: Goldens) -> None:
    """The second prompt begins with what the first left, and the first, run again, with what the last left."""
    again = repeats(StaleModel(table(0)), goldens)
    report = check_repeatable(StaleModel(table(0)), goldens, OPEN, OPEN, repeatable=again)
    assert report.prompts[0].quantized.tokens_equal
    assert not report.prompts[1].quantized.tokens_equal
    assert rules(report) == [("itself", "repeatable", "0")]


def test_whole_vocabulary_references_see_what_the_recorded_miss(recorded: tuple[Goldens, FullLogits]) -> None:
    goldens, full = recorded
    wrong = table(0)
    row = sum((i + 1) * token for i, token in enumerate(PROMPTS["0"])) % 97
    wrong[row, int(wrong[row].argmin())] += 1  # far below the recorded logits
    limits = QuantizedLimits(max_logit_difference=0.5)
    assert check(TableModel(wrong), goldens, limits, OPEN).passed
    report = check(TableModel(wrong), goldens, limits, OPEN, full)
    assert rules(report) == [("quantized", "max_logit_difference", "0")]
    assert report.prompts[0].quantized.whole_vocabulary


def test_perplexity_ratio(goldens: Goldens) -> None:
    report = check(TableModel(table(0) * 1.5), goldens, QuantizedLimits(max_perplexity_ratio=1.01), OPEN)
    expected = math.exp(nll(TableModel(table(0) * 1.5), goldens.text.ids, 8))
    assert report.perplexity.program == pytest.approx(expected, rel=1e-5)
    assert rules(report) == [("quantized", "max_perplexity_ratio", None)]


@pytest.mark.parametrize(
    ("limits", "kept", "message"),
    [
        (Limits(max_perplexity_ratio=1.1), "prompts", "max_perplexity_ratio is set, but the goldens hold no text"),
        (Limits(max_margin=0.1), "text", "max_margin is set, but the goldens hold no prompt"),
        (Limits(min_equal_prompts=1), "text", "min_equal_prompts is set, but the goldens hold no prompt"),
    ],
)
def test_a_limit_that_nothing_measures_is_refused(goldens: Goldens, limits: Limits, kept: str, message: str) -> None:
    part = Goldens(goldens.prompts, None) if kept == "prompts" else Goldens((), goldens.text)
    with pytest.raises(UserError, match=message):
        check(TableModel(table(0)), part, OPEN, limits)


def test_goldens_of_another_vocabulary_are_refused(goldens: Goldens) -> None:
    class Small(TableModel):
        def prefill(self, ids: Sequence[int]) -> torch.Tensor:
            return super().prefill(ids)[:50]

    with pytest.raises(UserError, match="gives 50 logits"):
        check(Small(table(0)), goldens, OPEN, OPEN)


@pytest.mark.parametrize("scale", [1.0, math.nan])
def test_report_round_trip(goldens: Goldens, tmp_path: Path, scale: float) -> None:
    report = check(TableModel(table(3) * scale), with_rounding(goldens, 0.25), STRICT, OPEN)
    write_report(report, tmp_path / "check.json")
    again = read_report(tmp_path / "check.json")
    assert again.model_dump_json() == report.model_dump_json()
    assert json.loads((tmp_path / "check.json").read_text())["passed"] is False
    assert [file.name for file in tmp_path.iterdir()] == ["check.json"]


def test_other_json_is_no_report(tmp_path: Path) -> None:
    (tmp_path / "check.json").write_text('{"passed": true}')
    with pytest.raises(UserError, match="not a report of a check"):
        read_report(tmp_path / "check.json")
    with pytest.raises(UserError, match="cannot be read"):
        read_report(tmp_path / "none.json")


def test_limits_are_those_of_the_configuration() -> None:
    assert set(Limits.model_fields) == set(ConfigLimits.model_fields)
    settings = ConfigLimits(max_margin=0.1, min_equal_prompts=0.875).model_dump(mode="json")
    assert limits_from_config({"unquantized": settings}, "unquantized") == Limits(**settings)
    assert limits_from_config({"quantized": settings}, "unquantized") == Limits()
    assert set(QuantizedLimits.model_fields) == set(ConfigQuantizedLimits.model_fields)
    settings = ConfigQuantizedLimits(max_margin=0.1, max_kl_over_rounding=3).model_dump(mode="json")
    found = quantized_limits_from_config({"quantized": settings})
    assert found == QuantizedLimits(max_margin=0.1, max_kl_over_rounding=3)


@pytest.mark.parametrize(("name", "value"), [("max_margn", 1), ("max_margin", -1), ("min_equal_prompts", 2)])
def test_bad_limits_name_the_key(name: str, value: float) -> None:
    with pytest.raises(UserError, match=rf"check\.quantized\.{name}"):
        quantized_limits_from_config({"quantized": {name: value}})


# Rounding


def figures(kl: float) -> RoundingFigures:
    return RoundingFigures(
        equal_steps=4, max_margin=0.375, max_logit_difference=2.5, mean_logit_difference=0.625, mean_kl=kl
    )


def with_rounding(goldens: Goldens, recorded: float, whole: float = 1.0) -> Goldens:
    """``goldens`` with the KL of a float64 run for every prompt: of the recorded logits, of the whole vocabulary."""
    rounding = Rounding(recorded=figures(recorded), whole=figures(whole))
    return Goldens(tuple(replace(prompt, rounding=rounding) for prompt in goldens.prompts), goldens.text)


def shortened(prompt: GoldenPrompt, steps: int) -> GoldenPrompt:
    """The same prompt with its first steps alone, as if the model had ended it there."""
    both = [
        summarise(along(model, prompt.prompt_ids.tolist(), prompt.forced.tolist())[:steps])
        for model in (QUANTIZED, SOURCE)
    ]
    return GoldenPrompt(prompt.name, prompt.text, prompt.prompt_ids, prompt.forced[:steps], *both, prompt.rounding)


def test_kl_is_given_as_a_multiple_of_rounding_over_all_steps(goldens: Goldens) -> None:
    """Prompts of unequal length weigh as many times as they have steps."""
    floored = with_rounding(goldens, 0.25)
    uneven = Goldens((shortened(floored.prompts[0], 1), *floored.prompts[1:]), None)
    report = check(TableModel(table(3)), uneven, OPEN, OPEN)
    kl = [prompt.quantized.mean_kl for prompt in report.prompts]
    assert [prompt.quantized.steps for prompt in report.prompts] == [1, STEPS, STEPS]
    assert report.kl_over_rounding == pytest.approx((kl[0] + STEPS * kl[1] + STEPS * kl[2]) / (1 + 2 * STEPS) / 0.25)


def test_kl_over_rounding_is_limited(goldens: Goldens) -> None:
    floored = with_rounding(goldens, 0.25)
    value = check(TableModel(table(3)), floored, OPEN, OPEN).kl_over_rounding
    assert check(TableModel(table(3)), floored, QuantizedLimits(max_kl_over_rounding=value * 1.001), OPEN).passed
    report = check(TableModel(table(3)), floored, QuantizedLimits(max_kl_over_rounding=value * 0.999), OPEN)
    assert rules(report) == [("quantized", "max_kl_over_rounding", None)]
    assert report.violations[0].value == value
    assert "times that of eager against itself in float64, at most" in report.violations[0].message
    broken = check(TableModel(table(3) * math.nan), floored, QuantizedLimits(max_kl_over_rounding=1e9), OPEN)
    assert ("quantized", "max_kl_over_rounding", None) in rules(broken)


def test_a_run_that_rounds_nothing_allows_nothing(goldens: Goldens) -> None:
    floored = with_rounding(goldens, 0.0)
    assert check(TableModel(table(3)), floored, OPEN, OPEN).kl_over_rounding == math.inf
    report = check(TableModel(table(3)), floored, QuantizedLimits(max_kl_over_rounding=1e9), OPEN)
    assert rules(report) == [("quantized", "max_kl_over_rounding", None)]


def test_rounding_is_measured_as_the_program_is(recorded: tuple[Goldens, FullLogits]) -> None:
    goldens, full = recorded
    floored = with_rounding(goldens, recorded=0.25, whole=0.5)
    assert check(TableModel(table(3)), floored, OPEN, OPEN).prompts[0].rounding == figures(0.25)
    assert check(TableModel(table(3)), floored, OPEN, OPEN, full).prompts[0].rounding == figures(0.5)
    assert check(TableModel(table(3)), goldens, OPEN, OPEN, full).prompts[0].rounding is None


@pytest.mark.parametrize("missing", ["all", "one", "prompts"])
def test_a_limit_over_rounding_that_was_not_measured_is_refused(goldens: Goldens, missing: str) -> None:
    floored = with_rounding(goldens, 0.25)
    one = (replace(floored.prompts[0], rounding=None), *floored.prompts[1:])
    part = {"all": goldens, "one": Goldens(one, None), "prompts": Goldens((), goldens.text)}[missing]
    with pytest.raises(UserError, match="max_kl_over_rounding is set, but the goldens hold no run in float64"):
        check_repeatable(TableModel(table(0)), part, QuantizedLimits(max_kl_over_rounding=2), OPEN, repeatable=True)
    assert check(TableModel(table(0)), part, OPEN, OPEN).kl_over_rounding is None


def printed(report: CheckReport) -> str:
    console = Console(file=io.StringIO())
    show(report, console)
    return console.file.getvalue()


def test_the_table_shows_what_rounding_does_beside_the_program_s_figures(goldens: Goldens) -> None:
    report = check(TableModel(table(3)), with_rounding(goldens, 0.25), OPEN, OPEN)
    text = printed(report)
    row = next(line for line in text.splitlines() if line.startswith("│ long"))
    found = report.prompts[2].quantized
    assert f"{found.equal_steps}/{STEPS} (4/{STEPS})" in row
    assert f"{found.max_margin:.3g} (0.375)" in row
    assert f"{found.max_logit_difference:.3g} (2.5)" in row
    assert f"{found.mean_logit_difference:.3g} (0.625)" in row
    assert f"≥ {found.mean_kl:.3g} (≥ 0.25)" in row
    assert (
        f"mean KL over all steps: {report.kl_over_rounding:.3g} times that of eager against itself in float64" in text
    )
    assert text.count("in brackets: eager against itself in float64") == 1


def test_the_table_is_silent_about_rounding_that_was_not_measured(goldens: Goldens) -> None:
    assert "float64" not in printed(check(TableModel(table(3)), goldens, OPEN, OPEN))
