"""Judge a report by its limits: every violation with its measured value, the limit, and the prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from runners.check_report import Against, CheckReport, Limits, QuantizedLimits, Violation
from runners.errors import UserError
from runners.goldens import Goldens

PER_PROMPT = {  # limit -> the figure of a comparison, its name
    "max_margin": ("max_margin", "margin where tokens differ"),
    "max_logit_difference": ("max_logit_difference", "max |Δlogit|"),
    "max_mean_kl": ("mean_kl", "mean KL (nats)"),
}
PER_CASE = {  # limit -> whether it is a least value, the figure of a comparison, its name
    "max_output_difference": (False, "max_output_difference", "max |Δoutput|"),
    "min_cosine": (True, "cosine", "cosine of the embeddings"),
}
SHARES: dict[str, Literal["equal_top1", "equal_top5"]] = {
    "min_equal_top1": "equal_top1",
    "min_equal_top5": "equal_top5",
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
        _refuse_without_cases(goldens, limit)
    floors = [prompt.rounding for prompt in goldens.prompts]
    if quantized.max_kl_over_rounding is not None and (not floors or None in floors):
        raise UserError(
            "max_kl_over_rounding is set, but the goldens hold no run in float64: only prompts of a package that "
            "quantizes activations have one; remove the limit, or set check.prompts and rebuild"
        )


def _refuse_without_cases(goldens: Goldens, limit: Limits) -> None:
    kinds = {case.kind for case in goldens.cases}
    lacking = {
        "max_output_difference": not kinds,
        "min_cosine": "hidden" not in kinds,
        "min_equal_top1": "logits" not in kinds,
        "min_equal_top5": "logits" not in kinds,
    }
    wanted = next((name for name, lacks in lacking.items() if lacks and getattr(limit, name) is not None), None)
    if wanted is not None:
        what = {"min_cosine": "hidden states"}.get(wanted, "outputs" if not kinds else "logits")
        raise UserError(
            f"{wanted} is set, but the goldens hold no case with {what}: remove the limit, or set check.prompts, "
            "check.token_ids or check.images and rebuild"
        )


def violations(report: CheckReport) -> tuple[Violation, ...]:
    """Everything that fails the check, in the order of the report."""
    found = [*_unconditional(report)]
    found += _against(report, "quantized", report.limits_quantized)
    found += _over_rounding(report, report.limits_quantized.max_kl_over_rounding)
    found += _against(report, "unquantized", report.limits_unquantized)
    if report.verified:  # the same limits, by itself: what is right through forward makes up for nothing here
        through = violations(report.of_verify)
        found += [one.model_copy(update={"message": f"through verify: {one.message}"}) for one in through]
    return tuple(found)


def _unconditional(report: CheckReport) -> Iterator[Violation]:
    for prompt in report.prompts:
        if not prompt.finite:
            message = f"prompt {prompt.name}: the program's logits contain NaN or infinity"
            yield Violation(against="itself", rule="finite", value=0, limit=1, prompt=prompt.name, message=message)
    for case in report.cases:
        if not case.finite:
            message = f"case {case.name}: the program's output contains NaN or infinity"
            yield Violation(against="itself", rule="finite", value=0, limit=1, prompt=case.name, message=message)
    if not report.repeatable:
        what, name = ("prompt", report.prompts[0].name) if report.prompts else ("case", report.cases[0].name)
        message = f"{what} {name}, run again after the others, gave other logits: the program kept something of them"
        yield Violation(against="itself", rule="repeatable", value=0, limit=1, prompt=name, message=message)


def _against(report: CheckReport, against: Against, limits: Limits) -> Iterator[Violation]:
    for prompt in report.prompts:
        for rule, (figure, label) in PER_PROMPT.items():
            value, limit = getattr(prompt.against(against), figure), getattr(limits, rule)
            if limit is not None and not value <= limit:  # a NaN is no pass
                yield _violation(against, rule, value, limit, prompt.name, f"prompt {prompt.name}: {label}")
    yield from _unequal(report, against, limits.min_equal_prompts)
    yield from _of_cases(report, against, limits)
    ratio = limits.max_perplexity_ratio
    if ratio is not None and report.perplexity is not None and not report.perplexity.ratio(against) <= ratio:
        yield _violation(
            against, "max_perplexity_ratio", report.perplexity.ratio(against), ratio, None, "perplexity ratio"
        )


def _of_cases(report: CheckReport, against: Against, limits: Limits) -> Iterator[Violation]:
    for case in report.cases:
        for rule, (least, figure, label) in PER_CASE.items():
            value, limit = getattr(case.against(against), figure), getattr(limits, rule)
            if limit is None or value is None or (value >= limit if least else value <= limit):
                continue  # a NaN is no pass
            yield _violation(against, rule, value, limit, case.name, f"case {case.name}: {label}", least=least)
    for rule, share in SHARES.items():
        limit = getattr(limits, rule)
        if limit is not None and not report.top_share(against, share) >= limit:
            value, label = report.top_share(against, share), f"share of rows with {share.replace('_', ' ')}"
            yield _violation(against, rule, value, limit, None, label, least=True)


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


def _violation(
    against: Against,
    rule: str,
    value: float,
    limit: float,
    prompt: str | None,
    subject: str,
    *,
    least: bool = False,
) -> Violation:
    wanted = f"at least {limit:.6g} wanted" if least else f"at most {limit:.6g} allowed"
    message = f"{subject} against {against} is {value:.6g}, {wanted} ({rule})"
    return Violation(against=against, rule=rule, value=value, limit=limit, prompt=prompt, message=message)
