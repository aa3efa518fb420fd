"""Measure speculation against plain decoding: on a text that repeats itself, and on one that does not.

Unlike the trials of ``bench.py``, these write what the model itself chooses, for it is the model that repeats or does
not: a small one may repeat itself on the free text too, which the share of right guesses then shows. An end-of-sequence
token does not end them. Plain and speculative trials alternate on one loaded program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runners.bench import Workload
from runners.bench_report import SpeculationFigures, ratio, spread
from runners.chat_encoding import encode_chat
from runners.errors import UserError
from runners.generate import Answer, generate
from runners.package import Package
from runners.sampling import greedy
from runners.session import Session
from runners.speculation import Speculation, require_speculation
from runners.template import Message, open_template
from runners.tokenizer import open_tokenizer

_REPEATED = (
    "The harbour office opens at seven on weekdays and at nine on Sundays. Boats longer than twelve metres moor at "
    "the northern pier, all others at the southern one; the fee is paid in advance, and the receipt is kept on board. "
    "Water and power are free for two hours. After that the warden reads the meter each evening and leaves a note. "
)
_FREE = "Tell me in your own words why the sky is blue, and why it turns red in the evening."
_LEAST_COPIES = 3  # of the repeated passage in the prompt


@dataclass(frozen=True)
class _Task:
    name: str
    prompt: list[int]


def measure_speculation(
    package: Package, work: Workload, threads: int, progress: Callable[[str], None]
) -> list[SpeculationFigures]:
    """Measure both texts, with as many trials as the workload says.

    Raises:
        UserError: see :func:`require_measurable`.
    """
    require_measurable(package, work)
    tasks = _tasks(package, work.prompt_tokens)
    session = Session.open(package, threads)
    return [_measure(session, task, work, progress) for task in tasks]


def require_measurable(package: Package, work: Workload) -> None:
    """Refuse what cannot be measured, before anything is loaded.

    Raises:
        UserError: the package cannot speculate, or has no tokenizer; or the workload says where decoding begins.
    """
    require_speculation(package)
    open_tokenizer(package)
    if work.at is not None:
        raise UserError("--speculate measures right after a prompt: leave --at out, or give more --prompt-tokens.")


def _tasks(package: Package, prompt_tokens: int) -> list[_Task]:
    """A prompt of copies of a passage, the last one broken off; and a question, as a chat where there is a template."""
    codec, template = open_tokenizer(package), open_template(package)
    question: list[Message] = [{"role": "user", "content": _FREE}]
    free = codec.encode(_FREE) if template is None else encode_chat(codec, template, question)
    passage = codec.encode(_REPEATED)
    passage = passage[: max(1, prompt_tokens // _LEAST_COPIES)]
    repeated = [passage[index % len(passage)] for index in range(prompt_tokens)]
    return [_Task("a repeated passage", repeated), _Task("free text", free[-prompt_tokens:])]


def _measure(session: Session, task: _Task, work: Workload, progress: Callable[[str], None]) -> SpeculationFigures:
    plain: list[Answer] = []
    speculative: list[Answer] = []
    for number in range(work.warmup + work.trials):
        progress(f"{task.name}, trial {max(0, number - work.warmup + 1)} of {work.trials}")
        for speculates in (False, True) if number % 2 == 0 else (True, False):
            (speculative if speculates else plain).append(_trial(session, task.prompt, work.new_tokens, speculates))
    return _figures(task, plain[work.warmup :], speculative[work.warmup :])


def _trial(session: Session, prompt: Sequence[int], new_tokens: int, speculates: bool) -> Answer:
    session.reset()
    speculation = Speculation(session) if speculates else None
    return generate(
        session,
        prompt,
        greedy,
        eos_ids=frozenset(),
        max_new_tokens=new_tokens + 1,  # the first comes from the prompt
        emit=lambda _: None,
        speculation=speculation,
    )


def _figures(task: _Task, plain: Sequence[Answer], speculative: Sequence[Answer]) -> SpeculationFigures:
    found = [answer.acceptance for answer in speculative if answer.acceptance is not None]
    pairs = list(zip(plain, speculative, strict=True))
    return SpeculationFigures(
        name=task.name,
        prompt_tokens=len(task.prompt),
        plain_tokens_per_second=spread([_speed(answer) for answer in plain]),
        tokens_per_second=spread([_speed(answer) for answer in speculative]),
        ratio=ratio(task.name, [_speed(after) / _speed(before) for before, after in pairs]),
        tokens_per_call=sum(answer.steps for answer in speculative) / sum(each.calls for each in found),
        drafted=sum(each.drafted for each in found),
        accepted=sum(each.accepted for each in found),
        tokens=len(plain[0].tokens),
        equal_tokens=min(_equal(before.tokens, after.tokens) for before, after in pairs),
    )


def _speed(answer: Answer) -> float:
    return answer.steps / answer.decode_seconds


def _equal(left: Sequence[int], right: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    pairs = zip(left, right, strict=True)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), len(left))
