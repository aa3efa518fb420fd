"""What ``pteline run`` does with a session: one answer, or a conversation that keeps its cache between turns."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from types import FrameType

from rich.console import Console

from runners.chat_encoding import encode_chat
from runners.errors import UserError
from runners.generate import Answer, Finish, generate
from runners.sampling import Sampler
from runners.session import Session
from runners.speculation import Speculation
from runners.template import ChatTemplate, Message
from runners.tokenizer import TextCodec, TextStream

GREETING = "A conversation: /reset starts anew, /exit or the end of input (Ctrl-D) leaves, Ctrl-C stops an answer."


@dataclass(frozen=True)
class Speaker:
    """Everything an answer needs: where tokens come from, how they are chosen, and where text and notes go."""

    session: Session
    codec: TextCodec
    sampler: Sampler
    max_new_tokens: int
    write: Callable[[str], None]  # the answer's text, piece by piece
    notes: Console  # messages and statistics, on standard error
    stats: bool
    speculate: bool = False  # of a package that ``require_speculation`` takes, with a greedy sampler


def answer(speaker: Speaker, prompt: Sequence[int]) -> tuple[Answer, str]:
    """Answer ``prompt`` (the whole sequence of ids) and stream the text. Returns the answer and its text.

    The longest common beginning of the prompt and the session's tokens is not computed again. Ctrl-C ends the answer
    after the token at hand.

    Raises:
        UserError: the prompt is empty or does not fit into the context.
    """
    stream = TextStream(speaker.codec)
    pieces: list[str] = []

    def show(text: str) -> None:
        pieces.append(text)
        speaker.write(text)

    with interruptible() as stopped:
        result = generate(
            speaker.session,
            keep_common(speaker.session, prompt),
            speaker.sampler,
            eos_ids=speaker.codec.eos_ids,
            max_new_tokens=speaker.max_new_tokens,
            emit=lambda token: show(stream.push(token)),
            stopped=stopped,
            speculation=Speculation(speaker.session) if speaker.speculate else None,
        )
    show(stream.finish())
    speaker.write("\n")
    _report(speaker, result)
    return result, "".join(pieces)


def keep_common(session: Session, prompt: Sequence[int]) -> Sequence[int]:
    """Rewind the session to what its tokens have in common with ``prompt``; the ids that remain to be fed.

    At least one id remains, since logits come from feeding one.
    """
    if len(prompt) > session.max_length:
        return prompt  # the session refuses it: keep what it holds
    common = 0
    for held, wanted in zip(session.tokens, prompt[:-1], strict=False):
        if held != wanted:
            break
        common += 1
    return prompt[session.rewind(common) :]


def chat(speaker: Speaker, template: ChatTemplate, system: str | None, lines: Iterator[str]) -> None:
    """Hold a conversation: each of ``lines`` is a user's turn or a command, until they end or ``/exit`` comes."""
    speaker.notes.print(GREETING, markup=False, style="dim", highlight=False, soft_wrap=True)
    opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    messages = list(opening)
    for line in lines:
        text = line.strip()
        if text == "/exit":
            return
        if text == "/reset":
            speaker.session.reset()
            messages = list(opening)
            speaker.notes.print("The conversation starts anew.", style="dim")
        elif text.startswith("/") and " " not in text and "/" not in text[1:]:
            speaker.notes.print(f"{text} is no command; there are /reset and /exit.", markup=False)
        elif text:
            messages = _turn(speaker, template, messages, text)


def _turn(speaker: Speaker, template: ChatTemplate, messages: list[Message], text: str) -> list[Message]:
    """One turn; the conversation after it. A turn that does not fit is left out of the conversation."""
    asked: list[Message] = [*messages, {"role": "user", "content": text}]
    prompt = encode_chat(speaker.codec, template, asked)
    try:
        _, reply = answer(speaker, prompt)
    except UserError as error:
        speaker.notes.print(f"{error} Or give /reset to start anew.", markup=False, style="red")
        return messages
    return [*asked, {"role": "assistant", "content": reply}]


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """While open, a first Ctrl-C makes the yielded function true; a second one raises KeyboardInterrupt.

    An exception at any moment could come after the program wrote its cache and before the session noted it.
    """
    event = Event()

    def stop(number: int, frame: FrameType | None) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    previous = signal.signal(signal.SIGINT, stop)
    try:
        yield event.is_set
    finally:
        signal.signal(signal.SIGINT, previous)


def _report(speaker: Speaker, result: Answer) -> None:
    notes, finish = speaker.notes, result.finish
    if finish is Finish.LENGTH:
        notes.print(f"[stopped: --max-new-tokens {speaker.max_new_tokens} was reached]", markup=False, style="dim")
    elif finish is Finish.CONTEXT:
        length = speaker.session.max_length
        notes.print(f"[stopped: the context of {length} tokens is full]", markup=False, style="yellow")
    elif finish is Finish.STOPPED:
        notes.print("[stopped]", markup=False, style="dim")
    if speaker.stats:
        notes.print(_statistics(result, speaker), markup=False, style="dim", highlight=False, soft_wrap=True)


def _statistics(result: Answer, speaker: Speaker) -> str:
    session = speaker.session
    decode = f"{result.steps / result.decode_seconds:.1f} tokens/s" if result.steps else "no steps"
    return (
        f"prompt {result.prompt_tokens} tokens computed, first token after {result.prefill_seconds * 1e3:.0f} ms "
        f"({result.prompt_tokens / result.prefill_seconds:.1f} tokens/s); answer {len(result.tokens)} tokens, "
        f"{decode}{_speculated(result)}; context {session.position} of {session.max_length}; "
        f"seed {speaker.sampler.seed}; {result.finish.value}"
    )


def _speculated(result: Answer) -> str:
    found = result.acceptance
    if found is None or not found.calls:
        return ""
    return f", {result.steps / found.calls:.2f} tokens a call ({found.accepted} of {found.drafted} guesses right)"
