"""Replay a package's goldens on its program and judge the outcome by the limits of its configuration.

N steps, V vocabulary. No tolerance is built in: what fails is what the limits, taken from the YAML, forbid, and two
things always: logits that are not finite, and a prompt that gives other logits when it is run again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from runners.check_limits import refuse_unmeasurable, violations
from runners.check_report import (
    CheckReport,
    Comparison,
    Difference,
    Limits,
    PerplexityReport,
    PromptReport,
    QuantizedLimits,
    kl_over_rounding,
)
from runners.choices import Choices, Row, joined, kept
from runners.errors import UserError
from runners.goldens import GoldenPrompt, Goldens, GoldenText, Reference
from runners.metrics import StepFigures, full_figures, margin, negative_log_likelihood, recorded_figures, windows
from runners.metrics_choices import choice_figures


class LogitSource(Protocol):
    """What can be checked: a loaded program with a cache. A returned tensor may be overwritten by the next call."""

    def reset(self) -> None:
        """Forget everything: the next token is at position 0."""

    def prefill(self, ids: Sequence[int]) -> Row:
        """Feed one token or more; return the logits after the last one, float [V], or the likeliest tokens."""

    def step(self, token: int) -> Row:
        """Feed one token; return the logits after it, float [V], or the likeliest tokens."""


@runtime_checkable
class Encoding(Protocol):
    """What the program of an encoder-decoder model has besides."""

    def encode(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Read an input, to which the tokens fed afterwards are an answer."""


class VerifySource(Protocol):
    """A program that gives the logits of several tokens in one call."""

    @property
    def max_verify(self) -> int:
        """Tokens a call at most."""

    def reset(self) -> None:
        """Forget everything: the next token is at position 0."""

    def prefill(self, ids: Sequence[int]) -> Row:
        """Feed one token or more."""

    def verify(self, ids: Sequence[int]) -> Row:
        """Feed 1 to ``max_verify`` tokens; return the logits after each, float [n, V], or the likeliest tokens."""


@dataclass(frozen=True)
class FullLogits:
    """Both references' logits over the whole vocabulary, prompt name -> float [N, V]; in memory only."""

    quantized: Mapping[str, torch.Tensor] = field(default_factory=dict)
    unquantized: Mapping[str, torch.Tensor] = field(default_factory=dict)


Progress = Callable[[str], None]


def _silent(_message: str) -> None:
    """Report progress to nobody."""


def check(
    source: LogitSource,
    goldens: Goldens,
    limits_quantized: QuantizedLimits,
    limits_unquantized: Limits,
    full: FullLogits | None = None,
    progress: Progress = _silent,
    *,
    repeatable: bool,
    verifier: VerifySource | None = None,
) -> CheckReport:
    """Run every golden on one loaded program, one after another.

    Args:
        source: The program. It is reset before each prompt and window, never loaded anew: a stale cache shows.
        goldens: What eager PyTorch said.
        limits_quantized: Limits against eager execution of the package's weights.
        limits_unquantized: Limits against eager execution of the source's weights.
        full: References over the whole vocabulary; prompts that are in it are compared over all of it.
        progress: Is told what comes next.
        repeatable: What :func:`repeats` found.
        verifier: The same program, where it has a method ``verify``: the prompts are run through that too.

    Raises:
        UserError: a limit is set that these goldens cannot measure, or the program's vocabulary is not the goldens'.
    """
    refuse_unmeasurable(goldens, limits_quantized, limits_unquantized)
    full = full or FullLogits()
    prompts: list[PromptReport] = []
    for number, prompt in enumerate(goldens.prompts, 1):
        progress(f"prompt {number} of {len(goldens.prompts)} ({prompt.name})")
        prompts.append(_report(prompt, run_prompt(source, prompt), full))
    verified = _verified(verifier, goldens.prompts, full, progress) if verifier is not None else ()
    perplexity = _perplexity(source, goldens.text, progress) if goldens.text is not None else None
    return judged(
        CheckReport(
            passed=False,
            prompts=tuple(prompts),
            perplexity=perplexity,
            repeatable=repeatable,
            kl_over_rounding=kl_over_rounding(prompts),
            limits_quantized=limits_quantized,
            limits_unquantized=limits_unquantized,
            violations=(),
            verified=verified,
        )
    )


def judged(report: CheckReport) -> CheckReport:
    """The report with its verdict by its own limits."""
    found = violations(report)
    return report.model_copy(update={"passed": not found, "violations": found})


def repeats(source: LogitSource, goldens: Goldens) -> bool:
    """Whether a prompt gives the same logits, bit by bit, after another one has been through the program.

    A program that reads what an earlier prompt left in its cache does not.

    Args:
        source: One loaded program on one thread. On several, kernels share out a prompt's rows as threads come free,
            and the last bits of a sum depend on it.
        goldens: Their first prompt is run before and after their second one, or before and after itself.
    """
    if not goldens.prompts:
        return True
    before = run_prompt(source, goldens.prompts[0])
    run_prompt(source, goldens.prompts[:2][-1])  # not the last: that may be one that fills the whole cache
    return _same_bits(run_prompt(source, goldens.prompts[0]), before)


def run_prompt(source: LogitSource, prompt: GoldenPrompt) -> Row:
    """The program's logits along the golden tokens of a prompt, float32 [N, V]; or the likeliest tokens at each.

    Raises:
        UserError: the prompt has an input for an encoder, and the program has none.
    """
    source.reset()
    if prompt.encoder:
        if not isinstance(source, Encoding):
            raise UserError(f"prompt {prompt.name} has an input for an encoder ({', '.join(prompt.encoder)}).")
        source.encode(prompt.encoder)
    rows = [kept(source.prefill(prompt.prompt_ids.tolist()))]
    rows += [kept(source.step(int(token))) for token in prompt.forced[:-1]]
    return joined(rows)


def _verified(
    verifier: VerifySource, prompts: Sequence[GoldenPrompt], full: FullLogits, progress: Progress
) -> tuple[PromptReport, ...]:
    found: list[PromptReport] = []
    for number, prompt in enumerate(prompts, 1):
        progress(f"prompt {number} of {len(prompts)} ({prompt.name}) through verify")
        found.append(_report(prompt, run_verify(verifier, prompt), full))
    return tuple(found)


def run_verify(source: VerifySource, prompt: GoldenPrompt) -> Row:
    """As :func:`run_prompt`, with the prompt's last token and those behind it in calls of ``verify``.

    A call has one token less than the one before it, from the most down to one and again: lengths are dynamic.
    """
    source.reset()
    if prompt.prompt_ids.shape[0] > 1:
        source.prefill(prompt.prompt_ids[:-1].tolist())
    left = [int(prompt.prompt_ids[-1]), *prompt.forced[:-1].tolist()]
    rows, size = [], source.max_verify
    while left:
        rows.append(kept(source.verify(left[:size])))
        left, size = left[size:], size - 1 or source.max_verify
    return joined(rows)


def _same_bits(left: Row, right: Row) -> bool:
    """Whether two are equal bit by bit: NaN equals itself here, and -0 differs from 0."""
    if isinstance(left, Choices) and isinstance(right, Choices):
        return _same_bits(left.logits, right.logits) and bool(torch.equal(left.ids, right.ids))
    assert isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)
    return bool(torch.equal(left.view(torch.int32), right.view(torch.int32)))


def _report(prompt: GoldenPrompt, logits: Row, full: FullLogits) -> PromptReport:
    rounding = None if isinstance(logits, Choices) else prompt.rounding  # which was measured over other logits
    values = logits.logits if isinstance(logits, Choices) else logits
    return PromptReport(
        name=prompt.name,
        text=prompt.text,
        prompt_tokens=prompt.prompt_ids.shape[0],
        finite=bool(values.isfinite().all()),
        quantized=compare(logits, prompt.quantized, full.quantized.get(prompt.name)),
        unquantized=compare(logits, prompt.unquantized, full.unquantized.get(prompt.name)),
        rounding=rounding and (rounding.whole if prompt.name in full.quantized else rounding.recorded),
    )


def compare(logits: Row, reference: Reference, full: torch.Tensor | None = None) -> Comparison:
    """Compare the program's logits, float [N, V], with a reference taken along the same tokens.

    Args:
        logits: The program's; or the likeliest tokens at each step.
        reference: What was recorded of the reference.
        full: The reference's logits over the whole vocabulary, float [N, V], where they are at hand.

    Raises:
        UserError: the reference names tokens beyond the program's vocabulary.
    """
    if isinstance(logits, Choices):
        figures, choices = choice_figures(logits, reference, full), logits.ids[:, 0]
    else:
        figures, choices = _figures(logits, reference, full), logits.argmax(-1)
    differences = _differences(choices, reference)
    return Comparison(
        steps=len(choices),
        equal_steps=len(choices) - len(differences),
        differences=differences,
        max_logit_difference=float(figures.max_difference.max()),
        mean_logit_difference=float(figures.mean_difference.mean()),
        mean_kl=float(figures.kl.mean()),
        max_kl=float(figures.kl.max()),
        whole_vocabulary=full is not None and not isinstance(logits, Choices),
        top_k=logits.ids.shape[-1] if isinstance(logits, Choices) else None,
    )


def _figures(logits: torch.Tensor, reference: Reference, full: torch.Tensor | None) -> StepFigures:
    largest = int(reference.top_ids.max())
    if largest >= logits.shape[-1]:
        raise UserError(f"the program gives {logits.shape[-1]} logits, the goldens speak of token {largest}")
    return full_figures(logits, full) if full is not None else recorded_figures(logits, reference)


def _differences(choices: torch.Tensor, reference: Reference) -> tuple[Difference, ...]:
    steps = (choices != reference.tokens).nonzero().flatten().tolist()
    return tuple(_difference(step, int(choices[step]), reference) for step in steps)


def _difference(step: int, choice: int, reference: Reference) -> Difference:
    found = margin(reference, step, choice)
    return Difference(
        step=step,
        wanted=int(reference.tokens[step]),
        got=choice,
        margin=found.value,
        margin_is_lower_bound=found.lower_bound,
    )


def _perplexity(source: LogitSource, text: GoldenText, progress: Progress) -> PerplexityReport:
    total, scored = 0.0, 0
    for window in windows(text.ids, text.window):
        progress(f"perplexity, {scored} of {text.ids.shape[0]} tokens")
        total += _window_nll(source, window)
        scored += window.shape[0] - 1
    return PerplexityReport(
        scored_tokens=scored,
        program=_exp(total / scored),
        quantized=_exp(text.quantized_nll),
        unquantized=_exp(text.unquantized_nll),
    )


def _window_nll(source: LogitSource, window: torch.Tensor) -> float:
    """Token by token: a program need not return the logits of a whole call. Nothing but one row is kept."""
    source.reset()
    logits = source.prefill([int(window[0])])
    total = 0.0
    for position in range(1, window.shape[0]):
        assert isinstance(logits, torch.Tensor), "the goldens of a program that chooses tokens have no text"
        total += negative_log_likelihood(logits.unsqueeze(0), window[position : position + 1])
        if position + 1 < window.shape[0]:
            logits = source.step(int(window[position]))
    return total


def _exp(nll: float) -> float:
    """Perplexity; a loss too large for a float is an infinite one."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf
