"""A check's report on the terminal: one table a reference, a line of perplexity, the verdict."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from runners.check_report import Against, CheckReport, Comparison, Difference, PromptReport

REFERENCES: tuple[Against, ...] = ("quantized", "unquantized")
_TITLES: dict[Against, str] = {
    "quantized": "Against eager execution of the package's weights",
    "unquantized": "Against eager execution of the source's weights",
}


def render(report: CheckReport) -> RenderableType:
    """Figures of every prompt. The violations are not listed: they are the error message of a failed check."""
    parts: list[RenderableType] = [_table(report, against) for against in REFERENCES if report.prompts]
    if report.perplexity is not None:
        parts.append(Text(_perplexity(report)))
    verdict = "check passed" if report.passed else f"check FAILED, {len(report.violations)} limits broken"
    parts.append(Text(verdict, style="green" if report.passed else "bold red"))
    return Group(*parts)


def _table(report: CheckReport, against: Against) -> Table:
    table = Table(title=_TITLES[against], title_justify="left")
    table.add_column("prompt")
    for column in ("tokens", "equal"):
        table.add_column(column, justify="right")
    table.add_column("first difference")
    for column in ("max margin", "max |Δlogit|", "mean |Δlogit|", "mean KL"):
        table.add_column(column, justify="right")
    for prompt in report.prompts:
        table.add_row(*_row(prompt, prompt.against(against)))
    return table


def _row(prompt: PromptReport, comparison: Comparison) -> tuple[str, ...]:
    return (
        escape(prompt.name),
        str(prompt.prompt_tokens),
        f"{comparison.equal_steps}/{comparison.steps}",
        _difference(comparison.differences[0]) if comparison.differences else "",
        f"{comparison.max_margin:.3g}" if comparison.differences else "",
        f"{comparison.max_logit_difference:.3g}",
        f"{comparison.mean_logit_difference:.3g}",
        f"{'' if comparison.whole_vocabulary else '≥ '}{comparison.mean_kl:.3g}",
    )


def _difference(difference: Difference) -> str:
    bound = "≥ " if difference.margin_is_lower_bound else ""
    return f"step {difference.step}: {difference.wanted} → {difference.got}, margin {bound}{difference.margin:.3g}"


def _perplexity(report: CheckReport) -> str:
    figures = report.perplexity
    assert figures is not None, "the caller has looked"
    ratios = ", ".join(f"{figures.ratio(against):.4f} of {against}" for against in REFERENCES)
    return (
        f"perplexity over {figures.scored_tokens} tokens: {figures.program:.3f}, "
        f"eager quantized {figures.quantized:.3f}, eager unquantized {figures.unquantized:.3f} (ratio {ratios})"
    )
