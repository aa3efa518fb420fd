"""Sampling: each filter against what it says, and draws that repeat."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runners.errors import UserError
from runners.sampling import Sampler, Sampling, greedy, probabilities

LOGITS = torch.log(torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2]))
values = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=20).map(torch.tensor)


def kept(weights: torch.Tensor) -> set[int]:
    return set(torch.nonzero(weights).flatten().tolist())


def test_greedy_takes_the_largest_and_the_first_of_equals():
    assert greedy(LOGITS) == 1
    assert greedy(torch.tensor([0.0, 2.0, 2.0])) == 1
    assert Sampler(Sampling())(LOGITS) == 1


def test_temperature_divides_the_logits():
    found = probabilities(LOGITS, Sampling(temperature=2.0))
    torch.testing.assert_close(found, torch.softmax(LOGITS / 2, -1))


@pytest.mark.parametrize(("top_k", "expected"), [(1, {1}), (3, {1, 3, 4}), (5, {0, 1, 2, 3, 4}), (99, {0, 1, 2, 3, 4})])
def test_top_k_keeps_the_largest(top_k, expected):
    weights = probabilities(LOGITS, Sampling(temperature=1.0, top_k=top_k))
    assert kept(weights) == expected
    assert weights.sum() == pytest.approx(1)


@pytest.mark.parametrize(("top_p", "expected"), [(1e-9, {1}), (0.5, {1, 3}), (0.8, {1, 3, 4}), (0.99, {0, 1, 2, 3, 4})])
def test_top_p_keeps_the_fewest_that_reach_it(top_p, expected):
    assert kept(probabilities(LOGITS, Sampling(temperature=1.0, top_p=top_p))) == expected


def test_min_p_is_a_share_of_the_largest():
    assert kept(probabilities(LOGITS, Sampling(temperature=1.0, min_p=0.45))) == {1, 3, 4}


def test_filters_see_what_the_earlier_ones_kept():
    """After top-k 2 the two weigh 0.615 and 0.385, so that top-p 0.6 keeps one."""
    assert kept(probabilities(LOGITS, Sampling(temperature=1.0, top_k=2, top_p=0.6))) == {1}


@given(values, st.floats(0.01, 5), st.integers(0, 25), st.floats(0.01, 1), st.floats(0, 1))
def test_probabilities_are_a_distribution_that_keeps_the_best(logits, temperature, top_k, top_p, min_p):
    before = logits.clone()
    weights = probabilities(logits, Sampling(temperature, top_k, top_p, min_p))
    assert torch.equal(logits, before)
    assert weights.sum() == pytest.approx(1, abs=1e-4)
    unfiltered = probabilities(logits, Sampling(temperature))  # in which logits that differ by a last bit may be equal
    assert unfiltered[weights.argmax()] == unfiltered[greedy(logits)]  # of tokens that are as likely, any may be kept
    assert top_k == 0 or len(kept(weights)) <= top_k


def test_a_tiny_temperature_is_greedy_and_finite():
    weights = probabilities(torch.tensor([50.0, 90.0, 10.0]), Sampling(temperature=1e-38))
    assert weights.tolist() == [0, 1, 0]


def test_equal_seeds_draw_equally_and_others_do_not():
    def draws(seed):
        sampler = Sampler(Sampling(temperature=1.0, seed=seed))
        return [sampler(LOGITS) for _ in range(40)], sampler.seed

    assert draws(7) == draws(7)
    assert draws(7)[0] != draws(8)[0]
    free, seed = draws(None)
    assert draws(seed) == (free, seed)


def test_drawing_follows_the_probabilities():
    sampler = Sampler(Sampling(temperature=1.0, seed=0))
    counts = torch.bincount(torch.tensor([sampler(LOGITS) for _ in range(4000)]), minlength=5) / 4000
    torch.testing.assert_close(counts, torch.exp(LOGITS), atol=0.03, rtol=0)


def test_the_global_random_state_is_left_alone():
    state = torch.random.get_rng_state()
    Sampler(Sampling(temperature=1.0))(LOGITS)
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_are_a_broken_program(temperature):
    with pytest.raises(RuntimeError, match="NaN"):
        Sampler(Sampling(temperature=temperature))(torch.tensor([0.0, float("nan"), 3.0]))


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 2.0},
        {"seed": -1},
        {"seed": 1 << 63},
    ],
    ids=str,
)
def test_a_value_outside_its_range_names_the_option(values):
    name = next(iter(values)).replace("_", "-")
    with pytest.raises(UserError, match=f"--{name} is .*; expected"):
        Sampling(**values)
