"""``pteline run`` of a package that continues text: options that go together, the prompt's ids, an answer or a chat."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from rich.console import Console

from runners.chat import Speaker, answer, chat
from runners.chat_encoding import encode_chat
from runners.choices import chosen_tokens
from runners.errors import UserError
from runners.multimodal import open_text_session, question_about
from runners.package import Package
from runners.sampling import Sampler, Sampling
from runners.speculation import require_speculation
from runners.template import ChatTemplate, open_template
from runners.terminal import lines, prompt_text, write
from runners.tokenizer import open_tokenizer


@dataclass(frozen=True)
class RunOptions:
    """What the command line says beside the package."""

    prompt: str | None  # "-": standard input
    image: Path | None
    system: str | None
    raw: bool
    interactive: bool
    sampling: Sampling
    max_new_tokens: int
    threads: int | None
    stats: bool
    speculate: bool


def command(package: Package, options: RunOptions) -> None:
    """Answer the prompt, or hold a conversation.

    Raises:
        UserError: options do not go together, or with the package; the prompt is empty or does not fit.
    """
    _require_choices(package, options.sampling)
    if options.speculate:
        _require_speculation(package, options.sampling)
    template = None if options.raw else open_template(package)
    _require_usable(
        package,
        options.prompt,
        template,
        system=options.system,
        raw=options.raw,
        interactive=options.interactive,
    )
    if options.image is not None and options.interactive:
        raise UserError("--image is read with one question: leave --interactive out.")
    text = None if options.prompt is None else prompt_text(options.prompt)
    speaker = _speaker(package, options)
    if options.interactive:
        assert template is not None, "required above"
        chat(speaker, template, options.system, lines(speaker.notes, text))
    else:
        assert text is not None, "required above"
        answer(speaker, _prompt_ids(speaker, template, options.system, text, options.image))


def _require_usable(
    package: Package,
    prompt: str | None,
    template: ChatTemplate | None,
    *,
    system: str | None,
    raw: bool,
    interactive: bool,
) -> None:
    """Refuse combinations of options that would otherwise be ignored, before the program is loaded."""
    if not interactive and (prompt is None or not prompt.strip()):
        raise UserError("the prompt is empty: give some text, '-' for standard input, or --interactive.")
    if raw and (system is not None or interactive):
        option = "--interactive" if interactive else "--system"
        raise UserError(f"{option} needs the chat template, which --raw leaves out: give one of the two.")
    if interactive and prompt == "-":
        raise UserError("--interactive reads turns from standard input already: leave '-' out.")
    if template is None and (system is not None or interactive):
        option = "--interactive" if interactive else "--system"
        raise UserError(f"package '{package.manifest.name}' has no chat template, which {option} needs. Leave it out.")


def require_effect(sampling: Sampling) -> None:
    """Refuse options that greedy choice would ignore.

    Raises:
        UserError: it names them.
    """
    if sampling.temperature > 0:
        return
    given = {
        "--top-k": sampling.top_k != 0,
        "--top-p": sampling.top_p != 1,
        "--min-p": sampling.min_p != 0,
        "--seed": sampling.seed is not None,
    }
    if idle := [option for option, differs in given.items() if differs]:
        raise UserError(
            f"{', '.join(idle)}: no effect at --temperature 0, which always takes the likeliest token. Add a "
            f"temperature above 0, as --temperature 0.7, or leave {'it' if len(idle) == 1 else 'them'} out."
        )


def _require_choices(package: Package, sampling: Sampling) -> None:
    """Refuse to draw from more tokens than the program gives."""
    method = package.manifest.methods.get("forward")
    given = chosen_tokens(method) if method is not None else None
    if given is not None and sampling.top_k > given:
        raise UserError(
            f"--top-k is {sampling.top_k}, but the program of '{package.manifest.name}' gives its {given} likeliest "
            f"tokens alone: give {given} or less, or build with a larger export.top_k."
        )


def _require_speculation(package: Package, sampling: Sampling) -> None:
    if sampling.temperature > 0:
        raise UserError(
            f"--speculate takes the likeliest tokens, and --temperature {sampling.temperature} draws others: leave one "
            "of the two out."
        )
    require_speculation(package)


def _prompt_ids(
    speaker: Speaker, template: ChatTemplate | None, system: str | None, text: str, image: Path | None
) -> list[int]:
    opening = [] if system is None else [{"role": "system", "content": system}]
    messages = [*opening, {"role": "user", "content": text}]
    if image is not None:
        return question_about(speaker.session, image, speaker.codec, template, messages)
    return speaker.codec.encode(text) if template is None else encode_chat(speaker.codec, template, messages)


def _speaker(package: Package, options: RunOptions) -> Speaker:
    notes = Console(stderr=True)
    codec = open_tokenizer(package)
    begin = perf_counter()
    session = open_text_session(package, options.threads)
    if options.stats:
        notes.print(f"loaded in {(perf_counter() - begin) * 1e3:.0f} ms", style="dim", highlight=False)
    sampler = Sampler(options.sampling)
    return Speaker(session, codec, sampler, options.max_new_tokens, write, notes, options.stats, options.speculate)
