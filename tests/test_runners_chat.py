"""Conversations: the cache is kept between turns and never gives another answer than a fresh start would."""

from __future__ import annotations

import io
import os
import signal

import pytest
from rich.console import Console

from runners.chat import Speaker, answer, chat, interruptible, keep_common
from runners.package import open_package
from runners.sampling import Sampler, Sampling
from runners.session import Session
from runners.template import compile_template
from runners.tokenizer import open_tokenizer
from tests.packages import L, write_package

pytestmark = pytest.mark.export

TEMPLATE = compile_template(
    "{% for m in messages %}{{ m.role[0] + ':' + m.content }}<|im_end|>{% endfor %}a:", {}, "test"
)


@pytest.fixture(scope="module")
def package(toy_program, tmp_path_factory):
    return open_package(write_package(tmp_path_factory.mktemp("chat") / "toy", toy_program))


class Conversation:
    """A speaker whose text and notes are kept, and whose session counts the tokens it is fed."""

    def __init__(self, package, *, max_new_tokens: int = 5, stats: bool = False, write=None) -> None:
        self.text: list[str] = []
        self.fed: list[tuple[int, int]] = []  # position, tokens
        self.notes = io.StringIO()
        self.session = Session.open(package)
        feed = self.session.feed
        self.session.feed = lambda ids: (self.fed.append((self.session.position, len(ids))), feed(ids))[1]
        self.speaker = Speaker(
            self.session,
            open_tokenizer(package),
            Sampler(Sampling()),
            max_new_tokens,
            write or self.text.append,
            Console(file=self.notes, width=200),
            stats,
        )

    def hold(self, *lines: str, system: str | None = None) -> str:
        chat(self.speaker, TEMPLATE, system, iter(lines))
        return "".join(self.text)


def fresh_answers(package, *turns: str, system: str | None = None) -> str:
    """What the conversation would be if every turn were computed from an empty cache."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    shown = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        one = Conversation(package)
        _, reply = answer(one.speaker, one.speaker.codec.encode_rendered(TEMPLATE.render(messages)))
        messages.append({"role": "assistant", "content": reply})
        shown.append(reply + "\n")
    return "".join(shown)


def test_a_second_turn_computes_nothing_of_the_first_prompt_again_and_answers_alike(package):
    talk = Conversation(package)
    talk.hold("fox\n")
    first = sum(count for _, count in talk.fed)
    assert first == len(talk.speaker.codec.encode_rendered(TEMPLATE.render([{"role": "user", "content": "fox"}])))
    talk.fed.clear()
    talk.text.clear()
    text = talk.hold("fox\n", "dog\n")  # a conversation anew, on the cache that the first one left
    assert text == fresh_answers(package, "fox", "dog")
    same_turn, *next_turn = talk.fed
    assert same_turn == (first - 1, 1)  # logits come from feeding one token
    assert min(position for position, _ in next_turn) >= first


def test_reset_forgets_all_but_the_system_message(package):
    talk = Conversation(package)
    text = talk.hold("ale", "/reset", "dog", "/exit", "never said", system="jar")
    assert text == fresh_answers(package, "ale", system="jar") + fresh_answers(package, "dog", system="jar")


def test_a_conversation_begins_with_how_to_leave_and_to_reset(package):
    talk = Conversation(package)
    talk.hold("/exit")
    assert talk.notes.getvalue() == (
        "A conversation: /reset starts anew, /exit or the end of input (Ctrl-D) leaves, Ctrl-C stops an answer.\n"
    )


def test_a_special_token_that_is_typed_in_a_turn_is_text(package):
    """The program is fed what the template writes, and what was typed, then and in later turns."""
    talk = Conversation(package, max_new_tokens=1)
    talk.hold("a<|im_end|>", "b")
    rendered = TEMPLATE.render([{"role": "user", "content": "a<|im_end|>"}])
    first = talk.speaker.codec.encode_rendered(rendered)
    assert first.count(2) == 2
    held = list(talk.session.tokens)
    assert held[: len(first)] != first
    assert talk.speaker.codec.tokenizer.decode(held, skip_special_tokens=False).startswith(rendered)


def test_an_unknown_command_is_not_sent(package):
    talk = Conversation(package)
    assert talk.hold("/rest", "", "  ") == ""
    assert "/rest is no command; there are /reset and /exit." in talk.notes.getvalue()
    assert talk.fed == []


def test_a_path_is_no_command(package):
    assert Conversation(package).hold("/a/b") == fresh_answers(package, "/a/b")


def test_a_turn_that_does_not_fit_is_left_out_and_the_chat_goes_on(package):
    talk = Conversation(package)
    text = talk.hold("fox", "x" * 3 * L, "dog")
    assert text == fresh_answers(package, "fox", "dog")
    assert "/reset to start anew" in talk.notes.getvalue()


def test_ctrl_c_ends_the_answer_and_not_the_chat(package):
    text: list[str] = []

    def interrupting(piece: str) -> None:
        text.append(piece)
        if len(text) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    talk = Conversation(package, write=interrupting)
    talk.hold("fox", "/reset", "dog")
    first, second = "".join(text).splitlines()
    assert fresh_answers(package, "fox").startswith(first)
    assert fresh_answers(package, "dog") == second + "\n"
    assert "[stopped]" in talk.notes.getvalue()
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_second_ctrl_c_is_not_held_back():
    with pytest.raises(KeyboardInterrupt), interruptible() as stopped:
        os.kill(os.getpid(), signal.SIGINT)
        assert stopped()
        os.kill(os.getpid(), signal.SIGINT)


def test_common_beginning_is_kept_and_one_token_always_remains(package):
    session = Session.open(package)
    session.prefill([5, 6, 7, 8])
    assert keep_common(session, [5, 6, 7, 8, 9]) == [9]
    assert keep_common(session, [5, 6, 7, 8]) == [8]
    assert session.tokens == (5, 6, 7)
    assert keep_common(session, [5, 9, 7]) == [9, 7]
    assert session.tokens == (5,)
    assert keep_common(session, list(range(L + 1))) == list(range(L + 1))
    assert session.tokens == (5,)


def test_the_end_of_the_context_is_told(package):
    talk = Conversation(package, max_new_tokens=10 * L)
    answer(talk.speaker, [5, 6, 7])
    assert talk.session.position == L
    assert f"the context of {L} tokens is full" in talk.notes.getvalue()


def test_statistics_and_the_limit_are_told(package):
    talk = Conversation(package, stats=True)
    answer(talk.speaker, [5, 6, 7])
    notes = talk.notes.getvalue()
    assert "--max-new-tokens 5 was reached" in notes
    assert "prompt 3 tokens computed" in notes
    assert "answer 5 tokens, " in notes
    assert f"context 7 of {L}" in notes
