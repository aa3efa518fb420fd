"""Figures against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from runners.goldens import Reference, summarise
from runners.metrics import full_figures, margin, negative_log_likelihood, recorded_figures, windows

# Probabilities 1/2, 1/4, 1/8, 1/8 against 1/4, 1/4, 1/4, 1/4.
R = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
P = torch.tensor([[0.25, 0.25, 0.25, 0.25]]).log()
KL = 0.5 * math.log(2) + 0.25 * math.log(0.5)  # 1/2·ln 2 + 1/4·ln 1 + 2·1/8·ln 1/2


def recorded(logits: torch.Tensor, top: int) -> Reference:
    """A reference that keeps only ``top`` logits."""
    whole = summarise(logits)
    return Reference(whole.tokens, whole.top_ids[:, :top], whole.top_logits[:, :top], whole.log_sum_exp)


def test_kl_over_the_vocabulary() -> None:
    assert float(full_figures(P, R).kl) == pytest.approx(KL, rel=1e-6)


def test_kl_ignores_a_shift_of_all_logits() -> None:
    assert float(full_figures(P + 7, R).kl) == pytest.approx(KL, rel=1e-5)


def test_recorded_kl_merges_the_rest() -> None:
    # Recorded 1/2 and 1/4, the rest 1/4; the program gives 1/4, 1/4 and a rest of 1/2.
    expected = 0.5 * math.log(2) + 0.25 * math.log(1) + 0.25 * math.log(0.5)
    assert float(recorded_figures(P, recorded(R, 2)).kl) == pytest.approx(expected, rel=1e-6)


def test_recorded_kl_is_a_lower_bound() -> None:
    generator = torch.Generator().manual_seed(0)
    r, p = torch.randn(50, 100, generator=generator), torch.randn(50, 100, generator=generator)
    lower, exact = recorded_figures(p, recorded(r, 10)).kl, full_figures(p, r).kl
    assert bool((lower < exact).all())
    assert bool((lower > 0).all())


def test_recorded_kl_is_exact_where_everything_is_recorded() -> None:
    assert float(recorded_figures(P, recorded(R, 4)).kl) == pytest.approx(KL, rel=1e-6)


def test_equal_logits_have_no_divergence() -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)) * 4
    figures = recorded_figures(logits, summarise(logits))
    assert figures.max_difference.tolist() == [0] * 5
    assert figures.kl.tolist() == pytest.approx([0] * 5, abs=1e-6)  # log_sum_exp is recorded in float32


def test_differences_of_logits() -> None:
    reference = torch.tensor([[3.0, 1.0, 0.0, -2.0]])
    program = torch.tensor([[2.5, 1.0, 1.0, 5.0]])
    both = recorded_figures(program, recorded(reference, 3)), full_figures(program, reference)
    assert [float(figures.max_difference) for figures in both] == [1.0, 7.0]
    assert [float(figures.mean_difference) for figures in both] == [0.5, 8.5 / 4]


def test_margin_of_a_recorded_choice() -> None:
    found = margin(recorded(torch.tensor([[0.0, 4.0, 2.5, 1.0]]), 3), 0, choice=2)
    assert (found.value, found.lower_bound) == (1.5, False)


def test_margin_of_a_choice_outside_the_recorded_is_a_lower_bound() -> None:
    found = margin(recorded(torch.tensor([[0.0, 4.0, 2.5, 1.0]]), 3), 0, choice=0)
    assert (found.value, found.lower_bound) == (3.0, True)


def test_negative_log_likelihood() -> None:
    logits = torch.cat([R, P])
    assert negative_log_likelihood(logits, torch.tensor([1, 3])) == pytest.approx(2 * math.log(4), rel=1e-6)


def test_windows_drop_a_single_last_token() -> None:
    assert [part.tolist() for part in windows(torch.arange(7), 3)] == [[0, 1, 2], [3, 4, 5]]
    assert [part.tolist() for part in windows(torch.arange(8), 3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]
