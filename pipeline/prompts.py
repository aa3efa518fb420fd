"""The prompts of the check as token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from pipeline.artifacts import LoadedTokenizer
from pipeline.config import CheckSettings, QuantizeSettings
from pipeline.goldens import Prompt, prompt_length_to_the_end
from runners.chat_encoding import encode_chat, encode_question
from runners.errors import UserError
from runners.manifest import ImagePrompt
from runners.template import ChatTemplate, compile_template
from runners.tokenizer import TextCodec


def prompts_of(settings: CheckSettings, tokenizer: LoadedTokenizer, max_length: int) -> list[Prompt]:
    """Return every prompt of the check: those of the configuration, a long one, and one that fills the cache.

    Raises:
        UserError: a prompt has no tokens, or does not fit the cache with the steps that follow it.
    """
    ids_of = _encoder(tokenizer, settings.chat)
    prompts = [Prompt(str(i), text, ids_of(text)) for i, text in enumerate(settings.prompts)]
    filler = text_ids(settings, tokenizer)
    if filler is None:
        filler = torch.cat([p.ids for p in prompts]) if prompts else None
    if settings.long_prompt is not None and filler is not None:
        prompts.append(_filler("long", filler, settings.long_prompt))
    if settings.to_the_end and filler is not None:
        prompts.append(_filler("to_the_end", filler, prompt_length_to_the_end(max_length, settings.steps)))
    return _fitting(prompts, settings.steps, max_length)


def image_prompts_of(
    settings: CheckSettings,
    tokenizer: LoadedTokenizer,
    max_length: int,
    images: Sequence[str],
    image: ImagePrompt,
    features: int,
) -> list[Prompt]:
    """Return for each image one of the check's prompts, in turn, that is about it.

    Args:
        settings: give the prompts, at least one.
        tokenizer: encodes them.
        max_length: of the cache.
        images: their names.
        image: what an image becomes in a prompt.
        features: of one image.

    Raises:
        UserError: as :func:`prompts_of`, or there is no place for an image.
    """
    codec, template = _codec(tokenizer), _template(tokenizer) if settings.chat else None
    prompts = []
    for number, name in enumerate(images):
        text = settings.prompts[number % len(settings.prompts)]
        ids = encode_question(codec, template, [{"role": "user", "content": text}], image, features)
        prompts.append(Prompt(f"image {number}", f"{name}: {text}", torch.tensor(ids, dtype=torch.int64)))
    return _fitting(prompts, settings.steps, max_length)


def _fitting(prompts: list[Prompt], steps: int, max_length: int) -> list[Prompt]:
    for prompt in prompts:
        if not len(prompt.ids):
            raise UserError(f"check.prompts: the tokenizer makes no token of {prompt.text!r}; give another prompt.")
        if len(prompt.ids) + steps - 1 > max_length:
            raise UserError(
                f"check: prompt {prompt.name} has {len(prompt.ids)} tokens; with {steps} steps it does not fit the "
                f"cache of {max_length} (cache.max_length). Shorten it, or take fewer steps."
            )
    return prompts


def text_ids(settings: CheckSettings, tokenizer: LoadedTokenizer) -> torch.Tensor | None:
    """Return the ids of the perplexity text, int64 ``[n]`` with n at least ``tokens``; None without one.

    Raises:
        UserError: see :func:`ids_of_file`.
    """
    perplexity = settings.perplexity
    if perplexity is None:
        return None
    return ids_of_file(perplexity.text, perplexity.tokens, "check.perplexity", tokenizer)


def calibration_ids(settings: QuantizeSettings, tokenizer: LoadedTokenizer) -> torch.Tensor | None:
    """Return the ids that the search for scales runs through the model, int64 ``[n]``; None without a text.

    Raises:
        UserError: see :func:`ids_of_file`.
    """
    text = settings.calibration
    if text is None:
        return None
    return ids_of_file(text.text, text.tokens, "quantize.calibration", tokenizer)[: text.tokens]


def ids_of_file(path: Path, tokens: int, key: str, tokenizer: LoadedTokenizer) -> torch.Tensor:
    """Return the ids of a text file, int64 ``[n]``.

    Raises:
        UserError: the file is missing or is no UTF-8 text, or holds fewer than ``tokens`` tokens.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{key}.text: cannot read {path} as UTF-8 text ({error}).") from error
    ids = _codec(tokenizer).encode(text)
    if len(ids) < tokens:
        raise UserError(f"{key}.tokens: {path} holds {len(ids)} tokens, {tokens} are asked for; take fewer.")
    return torch.tensor(ids, dtype=torch.int64)


def chat_ids(text: str, tokenizer: LoadedTokenizer) -> torch.Tensor:
    """Return the ids of a user's message as the chat template renders it (without one: as it is), int64 ``[n]``."""
    return _encoder(tokenizer, chat=True)(text)


def _encoder(tokenizer: LoadedTokenizer, chat: bool) -> Callable[[str], torch.Tensor]:
    """What makes ids, int64 ``[n]``, of a text. It takes long to make for what it takes to use."""
    codec = _codec(tokenizer)
    template = _template(tokenizer) if chat else None
    if template is None:
        return lambda text: torch.tensor(codec.encode(text), dtype=torch.int64)

    def encode(text: str) -> torch.Tensor:
        return torch.tensor(encode_chat(codec, template, [{"role": "user", "content": text}]), dtype=torch.int64)

    return encode


def _template(tokenizer: LoadedTokenizer) -> ChatTemplate | None:
    if tokenizer.chat_template is None:
        return None
    return compile_template(tokenizer.chat_template, tokenizer.info.special_tokens, "the model's chat template")


def _codec(tokenizer: LoadedTokenizer) -> TextCodec:
    return TextCodec(Tokenizer.from_str(tokenizer.tokenizer_json), tokenizer.info)


def _filler(name: str, ids: torch.Tensor, length: int) -> Prompt:
    repeated = ids.repeat(-(-length // len(ids)))[:length]
    return Prompt(name, f"<the first {length} tokens of the text>", repeated, to_eos=False)
