"""``pteline run`` for a program without a cache: an embedding, the tokens behind masks, or the labels of an image.

S tokens of a text, D width, V vocabulary, C labels.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from runners.caller import HIDDEN, LOGITS, MASK, PIXELS, Caller, max_tokens, text_inputs
from runners.errors import UserError
from runners.image import preprocess, read_image
from runners.package import Package
from runners.pooling import pool
from runners.preprocessing import Pooling
from runners.tokenizer import TextCodec, open_tokenizer

TOP = 5
_SHOWN = 6  # values of an embedding


@dataclass(frozen=True)
class Guess:
    """One of the likeliest tokens or labels."""

    id: int
    name: str
    probability: float


@dataclass(frozen=True)
class Masked:
    """The likeliest tokens behind one mask."""

    position: int  # of the mask among the text's tokens
    guesses: tuple[Guess, ...]


def command(package: Package, text: str | None, image: Path | None, threads: int | None, *, as_json: bool) -> str:
    """What ``pteline run`` prints.

    Args:
        package: for one of the tasks of ``runners.caller``.
        text: for all but image classification, which takes none.
        image: a PNG or JPEG file, for image classification, which needs one.
        threads: of the runtime.
        as_json: every value, for programs.

    Raises:
        UserError: the input is missing, is of the other kind, or does not fit the program.
    """
    task = package.manifest.model.task
    if task == "image-classification":
        if image is None or text is not None:
            raise UserError(f"package '{package.manifest.name}' classifies images: give --image FILE, and no text.")
        guesses = classify(Caller.open(package, threads), image)
        return _json([asdict(guess) for guess in guesses]) if as_json else "".join(map(_line, guesses))
    if image is not None or text is None:
        raise UserError(f"package '{package.manifest.name}' (task {task}) takes a text, and no --image.")
    codec = open_tokenizer(package)
    ids = _ids(package, codec, text)
    if task == "embedding":
        return _shown(embed(Caller.open(package, threads), ids), len(ids), as_json=as_json)
    found = fill(package, codec, ids, threads)
    return _json([asdict(masked) for masked in found]) if as_json else "\n".join(map(_lines, found))


def embed(caller: Caller, ids: list[int]) -> torch.Tensor:
    """The embedding of a text, float32 ``[D]``, pooled as the package says.

    Raises:
        UserError: the ids do not fit the program.
    """
    inputs = text_inputs(ids)
    pooling = caller.package.manifest.pooling or Pooling(mode="mean", normalize=False)
    return pool(caller.call(inputs)[HIDDEN], inputs[MASK], pooling)[0]


def fill(package: Package, codec: TextCodec, ids: list[int], threads: int | None) -> list[Masked]:
    """The likeliest tokens behind each mask of a text.

    Raises:
        UserError: the text has no mask, or the tokenizer has no such token.
    """
    entry = package.manifest.tokenizer
    name = entry.special_tokens.get("mask_token") if entry is not None else None
    mask = codec.tokenizer.token_to_id(name) if name is not None else None
    if mask is None:
        raise UserError(f"package '{package.manifest.name}': its tokenizer has no mask token, so it can fill none.")
    places = [place for place, token in enumerate(ids) if token == mask]
    if not places:
        raise UserError(f"the text has no mask to fill: put {name} where the token is wanted.")
    logits = Caller.open(package, threads).call(text_inputs(ids))[LOGITS][0]
    return [Masked(place, top(logits[place], lambda token: codec.tokenizer.decode([token]))) for place in places]


def classify(caller: Caller, image: Path) -> tuple[Guess, ...]:
    """The likeliest labels of an image file.

    Raises:
        UserError: the file is no readable image, or the package says not how images are prepared.
    """
    manifest = caller.package.manifest
    if manifest.image is None:
        raise UserError(f"package '{manifest.name}' says not how images are prepared; build it again.")
    logits = caller.call({PIXELS: preprocess(read_image(image), manifest.image)})[LOGITS][0]
    labels = manifest.labels
    return top(logits, lambda index: labels[index] if labels is not None and index < len(labels) else str(index))


def top(logits: torch.Tensor, name_of: Callable[[int], str]) -> tuple[Guess, ...]:
    """The likeliest entries of float32 ``[V or C]``, with their probabilities."""
    found = logits.softmax(-1).topk(min(TOP, logits.shape[-1]))
    return tuple(Guess(i, name_of(i), p) for p, i in zip(found.values.tolist(), found.indices.tolist(), strict=True))


def _ids(package: Package, codec: TextCodec, text: str) -> list[int]:
    if not text.strip():
        raise UserError("the text is empty: give some, or '-' for standard input.")
    ids, most = codec.encode(text), max_tokens(package)
    if len(ids) > most:
        raise UserError(
            f"the text has {len(ids)} tokens, a call of '{package.manifest.name}' takes {most} at most. Shorten the "
            "text, or build with a larger export.max_length."
        )
    return ids


def _shown(embedding: torch.Tensor, tokens: int, *, as_json: bool) -> str:
    if as_json:
        return _json({"tokens": tokens, "embedding": embedding.tolist()})
    values = " ".join(f"{value:.4f}" for value in embedding[:_SHOWN].tolist())
    more = " …" if len(embedding) > _SHOWN else ""
    return f"{len(embedding)} dimensions, length {float(embedding.norm()):.4f}, {tokens} tokens: {values}{more}\n"


def _lines(masked: Masked) -> str:
    return f"mask at token {masked.position}:\n" + "".join(map(_line, masked.guesses))


def _line(guess: Guess) -> str:
    return f"{guess.probability:7.2%}  {guess.name}\n"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"
