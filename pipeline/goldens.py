"""Goldens from eager PyTorch: the model's own ``forward`` and transformers' own cache.

N steps of a prompt, V vocabulary, n tokens of a prompt, M most steps of any prompt. The two references are separate
calls, so that a caller can free one model before it loads the other::

    quantized = record(quantized_model, prompts, steps, eos_ids)  # decodes greedily
    unquantized = record_forced(source_model, prompts, tokens_of(quantized))
    goldens = assemble(prompts, quantized, unquantized, text)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from transformers import DynamicCache, PreTrainedModel

from runners.check import FullLogits, compare
from runners.check_report import Comparison
from runners.goldens import GoldenPrompt, Goldens, GoldenText, Reference, Rounding, RoundingFigures, summarise
from runners.metrics import negative_log_likelihood, windows

NOTHING: Mapping[str, torch.Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class Prompt:
    """One prompt, tokenized: what the pipeline records goldens for."""

    name: str
    text: str
    ids: torch.Tensor  # int64 [n]
    to_eos: bool = True  # its steps end with the first end-of-sequence token; what follows one is no text of anyone's
    encoder: Mapping[str, torch.Tensor] = field(default_factory=dict)  # inputs of ``encode``, where the model has one
    arguments: Mapping[str, torch.Tensor] = field(default_factory=dict)  # of the forward, beside the prompt's tokens


@dataclass(frozen=True)
class Recording:
    """What one eager model said along one prompt."""

    reference: Reference
    logits: torch.Tensor | None  # float32 [N, V], where the caller asked to keep them


def prompt_length_to_the_end(max_length: int, steps: int) -> int:
    """Length of the prompt whose last fed token takes the last of ``max_length`` cache positions.

    Of N greedy tokens the last is never fed, hence n + N - 1 positions.

    Raises:
        ValueError: the cache is shorter than the steps.
    """
    if steps > max_length:
        raise ValueError(f"{steps} steps do not fit into a cache of {max_length} positions")
    return max_length - steps + 1


def record(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    steps: int,
    eos_ids: Collection[int],
    drafts: Sequence[torch.Tensor] | None = None,
    *,
    keep_logits: bool = False,
) -> tuple[Recording, ...]:
    """What a model says along its own greedy tokens.

    Args:
        model: In evaluation mode.
        prompts: Each is decoded from an empty cache.
        steps: M, at least 1.
        eos_ids: Tokens that end the steps of a prompt which says so (``Prompt.to_eos``); the token is its last.
        drafts: For each prompt a guess of its tokens, int64 [1 to M], such as a program's. The tokens recorded are the
            model's own whatever the guess; a good one saves most of the time (:func:`greedy_from_draft`).
        keep_logits: Also keep the logits over the whole vocabulary: 4·N·V bytes a prompt.
    """
    ends = [frozenset(eos_ids) if prompt.to_eos else frozenset() for prompt in prompts]
    if drafts is None:
        rows = zip(prompts, ends, strict=True)
        return tuple(_recording(greedy_logits(model, p.ids, steps, end, p.arguments), keep_logits) for p, end in rows)
    guesses = zip(prompts, [_extended(draft, steps) for draft in drafts], ends, strict=True)
    return tuple(
        _recording(greedy_from_draft(model, p.ids, guess, end, p.arguments), keep_logits) for p, guess, end in guesses
    )


def _extended(draft: torch.Tensor, steps: int) -> torch.Tensor:
    """A draft that ends early, at M tokens: its last token fills the rest."""
    return torch.cat([draft, draft[-1:].expand(steps - draft.shape[0])])


def record_forced(
    model: PreTrainedModel, prompts: Sequence[Prompt], forced: Sequence[torch.Tensor], *, keep_logits: bool = False
) -> tuple[Recording, ...]:
    """What a model says along given tokens, int64 [N] a prompt. Arguments as those of :func:`record`."""
    pairs = zip(prompts, forced, strict=True)
    return tuple(_recording(forced_logits(model, p.ids, tokens, p.arguments), keep_logits) for p, tokens in pairs)


def _recording(logits: torch.Tensor, keep_logits: bool) -> Recording:
    return Recording(summarise(logits), logits if keep_logits else None)


def tokens_of(recordings: Sequence[Recording]) -> tuple[torch.Tensor, ...]:
    """The greedy tokens of each prompt, int64 [N]: what the other reference is forced along."""
    return tuple(recording.reference.tokens for recording in recordings)


def greedy_logits(
    model: PreTrainedModel,
    prompt_ids: torch.Tensor,
    steps: int,
    eos_ids: Collection[int] = frozenset(),
    arguments: Mapping[str, torch.Tensor] = NOTHING,
) -> torch.Tensor:
    """Logits of N greedy steps, float32 [N, V]: of the prompt's last position, then after each token but the last.

    Every token but those of the prompt is fed alone, as a program's decode does.

    Args:
        model: In evaluation mode.
        prompt_ids: int64 [n].
        steps: M, at least 1; N is M, or less where a token of ``eos_ids`` comes earlier.
        eos_ids: The first of them is the last token.
        arguments: Of the forward, beside the prompt.
    """
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        rows = [_last_logits(model, prompt_ids, cache, arguments)]
        for _ in range(steps - 1):
            token = rows[-1].argmax(-1, keepdim=True)
            if int(token) in eos_ids:
                break
            rows.append(_last_logits(model, token, cache))
    return torch.stack(rows)


def forced_logits(
    model: PreTrainedModel,
    prompt_ids: torch.Tensor,
    forced: torch.Tensor,
    arguments: Mapping[str, torch.Tensor] = NOTHING,
) -> torch.Tensor:
    """The same logits along given tokens, int64 [N], by one ``forward`` without a cache: float32 [N, V].

    With arguments by two calls: they belong to the prompt, and to no token that the model writes after it.
    """
    if arguments:
        return _forced_after(model, prompt_ids, forced, arguments)
    ids = torch.cat([prompt_ids, forced[:-1]]).unsqueeze(0)
    with torch.inference_mode():
        output = model(input_ids=ids, use_cache=False, logits_to_keep=forced.shape[0])
    logits: torch.Tensor = output.logits
    return logits[0].float()


def _forced_after(
    model: PreTrainedModel, prompt_ids: torch.Tensor, forced: torch.Tensor, arguments: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        first = _last_logits(model, prompt_ids, cache, arguments).unsqueeze(0)
        if forced.shape[0] == 1:
            return first
        rest = model(input_ids=forced[:-1].unsqueeze(0), cache=cache, use_cache=True).logits[0]
    return torch.cat([first, rest.float()])


def greedy_from_draft(
    model: PreTrainedModel,
    prompt_ids: torch.Tensor,
    draft: torch.Tensor,
    eos_ids: Collection[int] = frozenset(),
    arguments: Mapping[str, torch.Tensor] = NOTHING,
) -> torch.Tensor:
    """The logits of :func:`greedy_logits`, by correcting a draft, int64 [M], until the model would write it so.

    One ``forward`` judges all tokens of the draft. Up to its first wrong token the draft is the model's own greedy
    choice, and so is the token that the model puts there: each round settles one more token at least, M rounds settle
    all of them, and a right draft takes one. Step by step it takes N calls, each of which reads all weights. The last
    call has n + M - 1 tokens whatever the draft was, so that the draft does not even change the rounding.
    """
    logits = forced_logits(model, prompt_ids, draft, arguments)
    for _ in range(draft.shape[0]):
        choices = logits.argmax(-1)
        fed = _length(choices, eos_ids) - 1  # the last token is never fed
        wrong = (choices[:fed] != draft[:fed]).nonzero()
        if wrong.numel() == 0:
            break
        draft = torch.cat([draft[: int(wrong[0])], choices[int(wrong[0]) :]])
        logits = forced_logits(model, prompt_ids, draft, arguments)
    return logits[: _length(logits.argmax(-1), eos_ids)]


def _length(tokens: torch.Tensor, eos_ids: Collection[int]) -> int:
    """Tokens, int64 [M], up to the first of ``eos_ids``, which counts; M where there is none."""
    return next((place for place, token in enumerate(tokens.tolist(), 1) if token in eos_ids), tokens.shape[0])


def _last_logits(
    model: PreTrainedModel,
    ids: torch.Tensor,
    cache: DynamicCache,
    arguments: Mapping[str, torch.Tensor] = NOTHING,
) -> torch.Tensor:
    """Feed int64 [n]; the logits of the last position, float32 [V]."""
    output = model(input_ids=ids.unsqueeze(0), cache=cache, use_cache=True, logits_to_keep=1, **arguments)
    logits: torch.Tensor = output.logits
    return logits[0, -1].float()


def mean_nll(model: PreTrainedModel, ids: torch.Tensor, window: int) -> float:
    """Mean negative log-likelihood of a text, nats a scored token; the windows are those of the check.

    Args:
        model: In evaluation mode.
        ids: int64 [n].
        window: Tokens a window, each one ``forward`` without a cache; the first token of each is not scored.

    Raises:
        ValueError: nothing to score.
    """
    total, scored = 0.0, 0
    for part in windows(ids, window):
        with torch.inference_mode():
            logits = model(input_ids=part.unsqueeze(0), use_cache=False).logits[0, :-1]
        total += negative_log_likelihood(logits, part[1:])
        scored += part.shape[0] - 1
    if not scored:
        raise ValueError(f"a text of {ids.shape[0]} tokens in windows of {window} leaves no token to score")
    return total / scored


def rounding_of(
    precise: PreTrainedModel, prompts: Sequence[Prompt], recordings: Sequence[Recording]
) -> tuple[Rounding, ...]:
    """How far the same weights, computed in float64, lie from what was recorded in float32, along the same tokens.

    Args:
        precise: The model of the recordings in float64.
        prompts: As recorded.
        recordings: With their logits.
    """
    pairs = zip(prompts, recordings, strict=True)
    return tuple(rounding(forced_logits(precise, p.ids, r.reference.tokens, p.arguments), r) for p, r in pairs)


def rounding(logits: torch.Tensor, recording: Recording) -> Rounding:
    """The same of one prompt, from the float64 model's logits ``[N, V]``."""
    reference = recording.reference
    whole = compare(logits, reference, recording.logits)
    return Rounding(recorded=_figures(compare(logits, reference)), whole=_figures(whole))


def _figures(found: Comparison) -> RoundingFigures:
    return RoundingFigures(
        equal_steps=found.equal_steps,
        max_margin=found.max_margin,
        max_logit_difference=found.max_logit_difference,
        mean_logit_difference=found.mean_logit_difference,
        mean_kl=found.mean_kl,
    )


def assemble(
    prompts: Sequence[Prompt],
    quantized: Sequence[Recording],
    unquantized: Sequence[Recording],
    text: GoldenText | None = None,
    rounding: Sequence[Rounding] | None = None,
) -> Goldens:
    """Put both references of each prompt together. ``unquantized`` is forced along ``tokens_of(quantized)``."""
    floors = rounding if rounding is not None else [None] * len(prompts)
    rows = zip(prompts, quantized, unquantized, floors, strict=True)
    return Goldens(tuple(_golden_prompt(*row) for row in rows), text)


def _golden_prompt(
    prompt: Prompt, quantized: Recording, unquantized: Recording, rounding: Rounding | None
) -> GoldenPrompt:
    return GoldenPrompt(
        name=prompt.name,
        text=prompt.text,
        prompt_ids=prompt.ids,
        forced=quantized.reference.tokens,
        quantized=quantized.reference,
        unquantized=unquantized.reference,
        rounding=rounding,
        encoder=prompt.encoder,
    )


def full_logits(
    prompts: Sequence[Prompt], quantized: Sequence[Recording], unquantized: Sequence[Recording]
) -> FullLogits:
    """The kept logits by prompt name, for a comparison over the whole vocabulary on the build host."""
    return FullLogits(quantized=_kept(prompts, quantized), unquantized=_kept(prompts, unquantized))


def _kept(prompts: Sequence[Prompt], recordings: Sequence[Recording]) -> dict[str, torch.Tensor]:
    pairs = zip(prompts, recordings, strict=True)
    return {prompt.name: recording.logits for prompt, recording in pairs if recording.logits is not None}
