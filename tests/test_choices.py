"""What can be known of a program that gives its likeliest tokens alone: figures, the choice, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runners.check import check, compare, repeats
from runners.check_report import Limits, QuantizedLimits
from runners.choices import Choices, joined, kept, likeliest
from runners.errors import UserError
from runners.goldens import GoldenPrompt, Goldens, Reference, summarise
from runners.metrics import full_figures
from runners.metrics_choices import choice_figures
from runners.sampling import Sampler, Sampling, greedy, probabilities

STEPS, VOCABULARY, N = 6, 200, 8


def logits(seed: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(STEPS, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * scale


def chosen(rows: torch.Tensor, count: int = N) -> Choices:
    found = rows.topk(count)
    return Choices(found.values, found.indices)


# Figures


@given(st.integers(0, 10_000), st.sampled_from([0.01, 0.5, 3.0]), st.integers(1, VOCABULARY), st.booleans())
def test_largest_difference_and_kl_are_not_larger_than_over_the_whole_vocabulary(seed, noise, count, at_hand):
    reference = logits(seed)
    program = reference + noise * logits(seed + 1, 1.0)
    whole = full_figures(program, reference)
    found = choice_figures(chosen(program, count), summarise(reference), reference if at_hand else None)
    assert (found.max_difference <= whole.max_difference + 1e-6).all()
    assert (found.kl <= whole.kl + 1e-6).all()
    assert (found.kl >= 0).all()
    if count == VOCABULARY and at_hand:
        torch.testing.assert_close(found.kl, whole.kl)
        torch.testing.assert_close(found.mean_difference, whole.mean_difference)


@pytest.mark.parametrize("at_hand", [True, False])
def test_the_mean_difference_is_that_of_the_chosen_tokens_alone(at_hand):
    reference = torch.linspace(5, -5, VOCABULARY).repeat(STEPS, 1)
    program = reference.clone()
    program[:, 0] += 1  # the likeliest, and nothing else
    found = choice_figures(chosen(program), summarise(reference), reference if at_hand else None)
    torch.testing.assert_close(found.mean_difference, torch.full((STEPS,), 1 / N, dtype=torch.float64))
    assert (found.mean_difference > full_figures(program, reference).mean_difference).all()


def test_of_equal_logits_every_figure_is_zero():
    rows = logits(0)
    for full in (rows, None):
        found = choice_figures(chosen(rows), summarise(rows), full)
        assert not found.max_difference.any()
        assert float(found.kl.max()) < 1e-12


@pytest.mark.parametrize("at_hand", [True, False])
def test_a_likely_token_that_is_left_out_shows(at_hand):
    """The program's logits are right, but it passes over the second likeliest token of step 2."""
    rows = logits(1)
    holed = rows.clone()
    second = int(rows[2].topk(2).indices[1])
    holed[2, second] = -100
    found = choice_figures(chosen(holed), summarise(rows), rows if at_hand else None)
    gap = float(rows[2, second] - holed[2].topk(N).values[-1])
    assert found.max_difference[2] == pytest.approx(gap)
    assert found.max_difference.argmax() == 2


@pytest.mark.parametrize("at_hand", [True, False])
def test_ids_that_do_not_belong_to_their_logits_show(at_hand):
    rows = logits(2)
    right = chosen(rows)
    wrong = Choices(right.logits, (right.ids + 1) % VOCABULARY)
    comparison = compare(wrong, summarise(rows), rows if at_hand else None)
    assert comparison.equal_steps == 0
    assert comparison.max_logit_difference > 1
    assert compare(right, summarise(rows), rows if at_hand else None).tokens_equal


def test_a_token_beyond_the_vocabulary_is_named():
    rows = logits(3)
    right = chosen(rows)
    with pytest.raises(UserError, match=f"the program chose token {VOCABULARY + 5}, the reference has {VOCABULARY}"):
        choice_figures(Choices(right.logits, right.ids.clamp(min=VOCABULARY + 5)), summarise(rows), rows)


# The check


class Table:
    """A program whose choices are rows of a table, one after another, in one place of memory."""

    def __init__(self, choices: Choices) -> None:
        self._choices, self._row = choices, 0
        self._place = kept(choices[0])

    def reset(self) -> None:
        self._row = -1

    def prefill(self, ids: list[int]) -> Choices:
        self._row += 1
        self._place.logits.copy_(self._choices.logits[self._row])
        self._place.ids.copy_(self._choices.ids[self._row])
        return self._place

    def step(self, token: int) -> Choices:
        return self.prefill([token])


def goldens(reference: Reference) -> Goldens:
    return Goldens((GoldenPrompt("0", "text", torch.tensor([1]), reference.tokens, reference, reference),), None)


def verdict(choices: Choices, rows: torch.Tensor) -> list[str]:
    recorded, source = goldens(summarise(rows)), Table(choices)
    limits = QuantizedLimits(min_equal_prompts=1.0, max_logit_difference=1e-3)
    report = check(source, recorded, limits, Limits(), repeatable=repeats(source, recorded))
    assert report.kl_over_rounding is None
    return [found.rule for found in report.violations]


def test_the_check_passes_what_is_right_and_fails_what_is_not():
    rows = logits(4)
    right = chosen(rows)
    assert verdict(right, rows) == []
    assert verdict(replace(right, logits=right.logits + 0.01), rows) == ["max_logit_difference"]
    assert verdict(replace(right, ids=right.ids.flip(-1)), rows) == ["max_logit_difference", "min_equal_prompts"]
    broken = right.logits.clone()
    broken[3, 2] = torch.nan
    assert "finite" in verdict(replace(right, logits=broken), rows)


def test_joined_rows_are_those_of_each_call():
    rows = logits(5)
    whole = chosen(rows)
    found = joined([chosen(rows[:2]), chosen(rows[2]), chosen(rows[3:])])
    assert torch.equal(found.logits, whole.logits)
    assert torch.equal(found.ids, whole.ids)
    assert torch.equal(joined([rows[0], rows[1:]]), rows)


# The choice


def test_the_greedy_token_is_that_of_all_logits():
    rows = logits(6)
    for row in rows:
        assert greedy(chosen(row)) == likeliest(chosen(row))[0] == greedy(row) == int(row.argmax())


def test_choices_with_nan_are_refused():
    with pytest.raises(RuntimeError, match="NaN"):
        greedy(Choices(torch.tensor([torch.nan, 1.0]), torch.tensor([3, 4])))


def test_tokens_are_drawn_by_their_weights_among_the_chosen():
    choices, sampling = Choices(torch.tensor([2.0, 1.0, -1.0]), torch.tensor([70, 5, 31])), Sampling(1.0, top_p=0.9)
    weights = probabilities(choices.logits, sampling)
    sampler = Sampler(replace(sampling, seed=4))
    drawn = torch.tensor([sampler(choices) for _ in range(4000)])
    for place, token in enumerate(choices.ids.tolist()):
        assert float((drawn == token).double().mean()) == pytest.approx(float(weights[place]), abs=0.03)
    assert float(weights[2]) == 0
