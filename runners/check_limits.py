"""Judge a report by its limits: every violation with its measured value, the limit, and the prompt."""

from __future__ import annotations

from collections.abc import Iterator

from runners.check_report import Against, CheckReport, Limits, QuantizedLimits, Violation
from runners.errors import UserError
from runners.goldens import Goldens

PER_PROMPT = {  # limit -> the figure of a comparison, its name
    "max_margin": ("max_margin", "margin where tokens differ"),
    "max_logit_difference": ("max_logit_difference", "max |Δlogit|"),
    "max_mean_kl": ("mean_kl", "mean KL (nats)"),
}


def refuse_unmeasurable(goldens: Goldens, quantized: QuantizedLimits, unquantized: Limits) -> None:
    """A limit that nothing measures would always pass.

    Raises:
        UserError: it names the limit and what the goldens lack.
    """
    for limit in (quantized, unquantized):
        if limit.max_perplexity_ratio is not None and goldens.text is None:
            raise UserError(
                "max_perplexity_ratio is set, but the goldens hold no text: set check.perplexity and rebuild"
            )
        wanted = [name for name in (*PER_PROMPT, "min_equal_prompts") if getattr(limit, name) is not None]
        if wanted and not goldens.prompts:
            raise UserError(f"{wanted[0]} is set, but the goldens hold no prompt: set check.prompts and rebuild")
    floors = [prompt.rounding for prompt in goldens.prompts]
    if quantized.max_kl_over_rounding is not None and (not floors or None in floors):
        raise UserError(
            "max_kl_over_rounding is set, but the goldens hold no run in float64: only prompts of a package that "
            "quantizes activations have one; remove the limit, or set check.prompts and rebuild"
        )


def violations(report: CheckReport) -> tuple[Violation, ...]:
    """Everything that fails the check, in the order of the report."""
    found = [*_unconditional(report)]
    found += _against(report, "quantized", report.limits_quantized)
    found += _over_rounding(report, report.limits_quantized.max_kl_over_rounding)
    found += _against(report, "unquantized", report.limits_unquantized)
    return tuple(found)


def _unconditional(report: CheckReport) -> Iterator[Violation]:
    for prompt in report.prompts:
        if not prompt.finite:
            message = f"prompt {prompt.name}: the program's logits contain NaN or infinity"
            yield Violation(against="itself", rule="finite", value=0, limit=1, prompt=prompt.name, message=message)
    if not report.repeatable:
        name = report.prompts[0].name
        message = f"prompt {name}, run again after the others, gave other logits: the program kept something of them"
        yield Violation(against="itself", rule="repeatable", value=0, limit=1, prompt=name, message=message)


def _against(report: CheckReport, against: Against, limits: Limits) -> Iterator[Violation]:
    for prompt in report.prompts:
        for rule, (figure, label) in PER_PROMPT.items():
            value, limit = getattr(prompt.against(against), figure), getattr(limits, rule)
            if limit is not None and not value <= limit:  # a NaN is no pass
                yield _violation(against, rule, value, limit, prompt.name, f"prompt {prompt.name}: {label}")
    yield from _unequal(report, against, limits.min_equal_prompts)
    ratio = limits.max_perplexity_ratio
    if ratio is not None and report.perplexity is not None and not report.perplexity.ratio(against) <= ratio:
        yield _violation(
            against, "max_perplexity_ratio", report.perplexity.ratio(against), ratio, None, "perplexity ratio"
        )


def _over_rounding(report: CheckReport, limit: float | None) -> Iterator[Violation]:
    value, rule = report.kl_over_rounding, "max_kl_over_rounding"
    if limit is None or value is None or value <= limit:
        return
    message = (
        f"mean KL against quantized is {value:.6g} times that of eager against itself in float64, at most {limit:.6g} "
        f"allowed ({rule})"
    )
    yield Violation(against="quantized", rule=rule, value=value, limit=limit, prompt=None, message=message)


def _unequal(report: CheckReport, against: Against, limit: float | None) -> Iterator[Violation]:
    rule = "min_equal_prompts"
    if limit is None or report.equal_share(against) >= limit:
        return
    value = report.equal_share(against)
    names = ", ".join(prompt.name for prompt in report.prompts if not prompt.against(against).tokens_equal)
    message = (
        f"tokens equal those of {against} on {value:.3g} of the prompts, at least {limit:.3g} wanted ({rule}); "
        f"not on: {names}"
    )
    yield Violation(against=against, rule=rule, value=value, limit=limit, prompt=None, message=message)


def _violation(against: Against, rule: str, value: float, limit: float, prompt: str | None, subject: str) -> Violation:
    message = f"{subject} against {against} is {value:.6g}, at most {limit:.6g} allowed ({rule})"
    return Violation(against=against, rule=rule, value=value, limit=limit, prompt=prompt, message=message)
