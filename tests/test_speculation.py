"""Speculation: the tokens are those of plain greedy decoding whatever is guessed, and bad guesses cost little."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runners import speculation
from runners.errors import UserError
from runners.generate import Answer, Finish, generate
from runners.manifest import Manifest
from runners.package import open_package
from runners.sampling import greedy
from runners.session import ContextEndError
from runners.speculation import LONGEST_REST, PRICE, SHORTEST_REST, Lookup, Pace, Speculation, require_speculation
from tests.packages import Program, write_package

V, MOST = 11, 5
Rule = Callable[[Sequence[int]], int]


class FakeSession:
    """A model whose next token is any function of all tokens in its cache; its output lies in one reused memory."""

    def __init__(self, rule: Rule, max_length: int = 1000) -> None:
        self.rule, self.max_length, self.max_verify = rule, max_length, MOST + 1
        self.held: list[int] = []
        self.calls = 0
        self.memory = torch.zeros(MOST + 1, V)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self.held)

    @property
    def position(self) -> int:
        return len(self.held)

    def prefill(self, ids: Sequence[int]) -> torch.Tensor:
        return self.fed(ids)[-1]

    def step(self, token: int) -> torch.Tensor:
        if self.position >= self.max_length:
            raise ContextEndError
        return self.fed([token])[0]

    def verify(self, ids: Sequence[int]) -> torch.Tensor:
        assert 0 < len(ids) <= self.max_verify
        assert self.position + len(ids) <= self.max_length
        return self.fed(ids)

    def rewind(self, position: int) -> int:
        assert 0 <= position <= self.position
        del self.held[position:]
        return position

    def fed(self, ids: Sequence[int]) -> torch.Tensor:
        self.calls += 1
        self.memory.zero_()
        for row, token in enumerate(ids):
            self.held.append(token)
            self.memory[min(row, MOST), self.rule(self.held)] = 1
        return self.memory[: len(ids)]


def scrambled(memory: int) -> Rule:
    """The next token depends on the last ``memory`` tokens: of few it soon repeats itself, of many it never does."""
    return lambda tokens: zlib.crc32(bytes(tokens[-memory:])) % V


def cycle(tokens: Sequence[int]) -> int:
    return (tokens[-1] + 1) % V


def answer(session: FakeSession, *, speculates: bool, tokens: int = 60, eos: int | None = None) -> Answer:
    ends = frozenset() if eos is None else frozenset([eos])
    session.prefill([3])
    found = Speculation(session) if speculates else None
    shown: list[int] = []
    result = generate(
        session, [1, 2], greedy, eos_ids=ends, max_new_tokens=tokens, emit=shown.append, speculation=found
    )
    assert shown == list(result.tokens)
    return result


def assert_equal(rule: Rule, max_length: int = 1000, **options: int | None) -> Answer:
    plain, speculative = FakeSession(rule, max_length), FakeSession(rule, max_length)
    wanted, found = answer(plain, speculates=False, **options), answer(speculative, speculates=True, **options)
    assert (found.tokens, found.finish, found.steps) == (wanted.tokens, wanted.finish, wanted.steps)
    assert speculative.tokens == plain.tokens
    assert found.acceptance is not None
    assert found.acceptance.calls == speculative.calls - 2
    return found


@given(st.integers(1, 6), st.integers(1, 80), st.none() | st.integers(0, V - 1), st.integers(3, 60))
def test_tokens_end_and_cache_are_those_of_plain_decoding(memory, tokens, eos, max_length):
    assert_equal(scrambled(memory), max_length, tokens=tokens, eos=eos)


@given(st.data())
def test_so_they_are_whatever_is_guessed(data):
    def anything(self: Lookup, most: int) -> list[int]:
        return data.draw(st.lists(st.integers(0, V - 1), max_size=most))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lookup, "draft", anything)
        assert_equal(scrambled(2), data.draw(st.integers(3, 60)), eos=data.draw(st.none() | st.integers(0, V - 1)))


@given(st.integers(0, MOST), st.integers(1, MOST))
def test_a_draft_that_is_right_up_to_a_place_is_kept_up_to_there(right, length):
    session = FakeSession(cycle)
    session.prefill([0])
    draft = [(2 + place) % V if place < right else 0 for place in range(length)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lookup, "draft", lambda self, most: draft)
        found = Speculation(session)
        assert found.advance(1, 100) == [2 + place for place in range(min(right, length) + 1)]
    assert session.tokens == tuple(range(min(right, length) + 2))
    assert (found.acceptance.drafted, found.acceptance.accepted) == (length, min(right, length))


def test_an_end_within_a_right_guess_leaves_nothing_of_it_behind():
    found = assert_equal(cycle, eos=9, tokens=100)
    assert found.finish is Finish.EOS
    session = FakeSession(cycle)
    session.prefill(list(range(V)) * 3)
    ended = generate(
        session,
        [0, 1],
        greedy,
        eos_ids=frozenset([4]),
        max_new_tokens=50,
        emit=lambda _: None,
        speculation=Speculation(session),
    )
    assert ended.tokens == (2, 3)
    assert session.tokens[-2:] == (2, 3)
    assert ended.acceptance is not None
    assert ended.acceptance.accepted >= 2  # the end itself, and what would have come behind it, was guessed


def test_a_repetition_takes_few_calls():
    found = assert_equal(cycle, tokens=120)
    assert found.acceptance is not None
    assert found.acceptance.accepted == found.acceptance.drafted
    # Eleven tokens until the first repetition, drafts of 2 and 4, and then of MOST.
    assert found.acceptance.calls < 14 + 2 + 120 / (MOST + 1) + 1


# What is guessed


def lookup(*tokens: int, longest: int = 3, shortest: int = 1) -> Lookup:
    found = Lookup(longest, shortest)
    found.extend(tokens)
    return found


def test_the_longest_match_wins_and_of_equals_the_last():
    assert lookup(1, 2, 3, 7, 9, 2, 3, 8, 0, 1, 2, 3).draft(1) == [7]
    assert lookup(2, 3, 7, 0, 2, 3, 8, 0, 2, 3).draft(2) == [8, 0]
    assert lookup(5, 1, 5, 2, 5).draft(1) == [2]


def test_without_a_match_nothing_is_guessed():
    assert lookup().draft(3) == []
    assert lookup(1).draft(3) == []
    assert lookup(1, 2, 3).draft(3) == []
    assert lookup(1, 2, 9, 2, shortest=2).draft(3) == []


def test_a_match_at_the_end_repeats_itself():
    assert lookup(1, 2, 1, 2).draft(5) == [1, 2, 1, 2, 1]
    assert lookup(4, 4).draft(3) == [4, 4, 4]


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 8))
def test_a_guess_is_what_a_search_from_the_end_finds(tokens, most):
    def searched() -> list[int]:
        for size in (3, 2, 1):
            for start in range(len(tokens) - size - 1, -1, -1):
                if tokens[start : start + size] == tokens[len(tokens) - size :]:
                    grown = list(tokens)
                    for place in range(most):
                        grown.append(grown[start + size + place])
                    return grown[len(tokens) :]
        return []

    assert lookup(*tokens).draft(most) == searched()


# When it is worth while


def test_guesses_that_are_all_wrong_cost_little():
    pace, drafted = Pace(8), 0
    for _ in range(1000):
        drafted += pace.length
        pace.note(pace.length, 0)
    assert 0 < drafted * PRICE < 1000 * 0.01


def test_right_guesses_make_longer_ones_and_half_right_ones_do_not():
    pace = Pace(8)
    assert pace.length == 2
    pace.note(2, 2)
    assert pace.length == 4
    pace.note(4, 2)
    assert pace.length == 4
    pace.note(4, 4)
    pace.note(8, 8)
    assert pace.length == 8
    pace.note(8, 3)
    assert pace.length == 4


def test_after_a_failure_it_rests_and_longer_each_time_until_a_guess_is_right():
    pace = Pace(8)

    def rests() -> int:
        while pace.length:
            pace.note(pace.length, 0)
        count = 0
        while not pace.length:
            pace.note(0, 0)
            count += 1
        return count

    assert [rests() for _ in range(5)] == [SHORTEST_REST, 2 * SHORTEST_REST, 4 * SHORTEST_REST, *[LONGEST_REST] * 2]
    pace.note(1, 1)
    assert rests() == SHORTEST_REST


def test_a_text_that_stops_repeating_itself_is_noticed():
    pace = Pace(8)
    for _ in range(1000):
        pace.note(pace.length, pace.length)
    calls = 0
    while pace.length:
        pace.note(pace.length, 0)
        calls += 1
    assert calls <= 4


# What cannot speculate


def without_full_cache(manifest: Manifest) -> Manifest:
    assert manifest.cache is not None
    tensor = manifest.cache.tensors[0].model_copy(update={"kind": "sliding"})
    return manifest.model_copy(update={"cache": manifest.cache.model_copy(update={"tensors": [tensor]})})


@pytest.mark.parametrize(
    ("methods", "change", "message"),
    [
        (("forward", "decode"), lambda manifest: manifest, r"no method verify, only forward, decode\. Build it with"),
        (("forward", "verify"), without_full_cache, "its cache has sliding windows or recurrent states"),
    ],
)
def test_a_package_that_cannot_is_refused(tmp_path: Path, methods, change, message: str):
    folder = write_package(tmp_path / "toy", Program(b"x", methods=methods), change=change)
    with pytest.raises(UserError, match=message):
        require_speculation(open_package(folder))


def test_a_package_that_can_is_not(tmp_path: Path):
    require_speculation(open_package(write_package(tmp_path / "toy", Program(b"x", methods=("forward", "verify")))))
    assert speculation.SHORTEST_MATCH <= speculation.LONGEST_MATCH
