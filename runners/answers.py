"""``pteline run`` for an encoder-decoder program: the transcript of a recording, or the answer to a text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from rich.console import Console

from runners.chat import interruptible
from runners.encoder_decoder import TOKENS, Seq2SeqSession
from runners.errors import UserError
from runners.generate import Answer, Finish, generate
from runners.manifest import TensorSpec
from runners.package import Package
from runners.sampling import Sampler
from runners.speech import pieces
from runners.tokenizer import TextCodec, TextStream, open_tokenizer
from runners.wav import read_wav


@dataclass(frozen=True)
class Writing:
    """How an answer is written.

    Args:
        sampler: chooses tokens.
        max_new_tokens: of an answer, or of one piece of a recording.
        write: takes the text, piece by piece.
        notes: takes messages and figures.
        stats: whether to print figures.
    """

    sampler: Sampler
    max_new_tokens: int
    write: Callable[[str], None]
    notes: Console
    stats: bool


def command(package: Package, text: str | None, audio: Path | None, threads: int | None, writing: Writing) -> None:
    """Write what the model makes of ``text`` or of the recording in ``audio``.

    Pieces of a long recording are transcribed one after the other, each by itself: a word at a border may be lost.

    Raises:
        UserError: the input is missing, is of the other kind, cannot be read, or does not fit.
    """
    _require_input(package, text, audio)
    codec = open_tokenizer(package)
    inputs = list(_inputs(package, codec, text, audio))  # what is wrong with them is said before the program is loaded
    session = Seq2SeqSession.open(package, threads)
    written = ""
    with interruptible() as stopped:
        for given in inputs:
            if stopped():
                break
            written += _answer(session, codec, given, writing, stopped, begin=" " if written else "")
    writing.write("\n")


def text_input(package: Package, codec: TextCodec, text: str) -> Mapping[str, torch.Tensor]:
    """The encoder's input of a text: ``tokens`` int64 ``[1, n]``.

    Raises:
        UserError: it has no tokens or too many.
    """
    ids, longest = codec.encode(text), _spec(package).shape[-1]
    if not 0 < len(ids) <= longest:
        raise UserError(f"the text has {len(ids)} tokens; '{package.manifest.name}' takes 1 to {longest}. Shorten it.")
    return {TOKENS: torch.tensor([ids], dtype=torch.int64)}


def audio_inputs(package: Package, path: Path) -> list[Mapping[str, torch.Tensor]]:
    """The encoder's input of each piece of a recording.

    Raises:
        UserError: the file cannot be read.
    """
    settings, spec = package.manifest.audio, _spec(package)
    assert settings is not None, "a package for speech has it"
    return [{spec.name: piece} for piece in pieces(read_wav(path), settings, spec.min_shape[-1], spec.shape[-1])]


def _require_input(package: Package, text: str | None, audio: Path | None) -> None:
    name, hears = package.manifest.name, package.manifest.audio is not None
    if hears and (audio is None or text is not None):
        raise UserError(f"package '{name}' transcribes recordings: give --audio FILE.wav, and no text.")
    if not hears and audio is not None:
        raise UserError(f"package '{name}' takes text: give some, and no --audio.")
    if not hears and (text is None or not text.strip()):
        raise UserError("the text is empty: give some, or '-' for standard input.")


def _inputs(
    package: Package, codec: TextCodec, text: str | None, audio: Path | None
) -> Iterator[Mapping[str, torch.Tensor]]:
    if audio is not None:
        yield from audio_inputs(package, audio)
    elif text is not None:
        yield text_input(package, codec, text)


def _answer(
    session: Seq2SeqSession,
    codec: TextCodec,
    given: Mapping[str, torch.Tensor],
    writing: Writing,
    stopped: Callable[[], bool],
    begin: str,
) -> str:
    """Answer to one input; the text as it was written."""
    stream, parts = TextStream(codec), [""]

    def show(text: str) -> None:
        text = text if parts[-1] else text.lstrip()  # a word's token holds the space before it
        if text:
            text = text if parts[-1] else begin + text
            parts.append(text)
            writing.write(text)

    start = perf_counter()
    session.encode(given)
    encoded = perf_counter() - start
    result = generate(
        session,
        session.decoding.prompt,
        writing.sampler,
        eos_ids=codec.eos_ids,
        max_new_tokens=writing.max_new_tokens,
        emit=lambda token: show(stream.push(token)),
        stopped=stopped,
    )
    show(stream.finish())
    _report(writing, result, encoded)
    return "".join(parts)


def _report(writing: Writing, result: Answer, encoded: float) -> None:
    notes = writing.notes
    if result.finish is not Finish.EOS:
        notes.print(f"[stopped: {result.finish.value}]", markup=False, style="dim")
    if writing.stats:
        speed = f"{result.steps / result.decode_seconds:.1f} tokens/s" if result.steps else "no steps"
        text = f"encoded in {encoded * 1e3:.0f} ms; answer {len(result.tokens)} tokens, {speed}; {result.finish.value}"
        notes.print(text, markup=False, style="dim", highlight=False, soft_wrap=True)


def _spec(package: Package) -> TensorSpec:
    """The encoder's input."""
    return package.manifest.methods["encode"].inputs[0]
