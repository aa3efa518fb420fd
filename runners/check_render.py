"""A check's report on the terminal: one table a reference, a line of perplexity, the verdict."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from runners.check_report import Against, CheckReport, Comparison, Difference, PromptReport
from runners.goldens import RoundingFigures

_WIDTH = 160  # of the tables, where the output is a file or a pipe

REFERENCES: tuple[Against, ...] = ("quantized", "unquantized")
_TITLES: dict[Against, str] = {
    "quantized": "Against eager execution of the package's weights",
    "unquantized": "Against eager execution of the source's weights",
}
_ITSELF = "eager against itself in float64"


def show(report: CheckReport, console: Console) -> None:
    """Print a report."""
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH)
    console.print(render(report))


def render(report: CheckReport) -> RenderableType:
    """Figures of every prompt. The violations are not listed: they are the error message of a failed check."""
    parts: list[RenderableType] = [_table(report, against) for against in REFERENCES if report.prompts]
    parts += [_case_table(report, against) for against in REFERENCES if report.cases]
    if report.kl_over_rounding is not None:
        parts.insert(1, Text(_over_rounding(report.kl_over_rounding)))
    if report.verified:
        parts += _through_verify(report.of_verify)
    if report.perplexity is not None:
        parts.append(Text(_perplexity(report)))
    verdict = "check passed" if report.passed else f"check FAILED, {len(report.violations)} limits broken"
    parts.append(Text(verdict, style="green" if report.passed else "bold red"))
    return Group(*parts)


def _through_verify(report: CheckReport) -> list[RenderableType]:
    parts: list[RenderableType] = [Text("The same prompts through the method verify, several tokens a call:")]
    parts += [_table(report, against) for against in REFERENCES]
    if report.kl_over_rounding is not None:
        parts.append(Text(_over_rounding(report.kl_over_rounding)))
    return parts


def _table(report: CheckReport, against: Against) -> Table:
    has_floor = against == "quantized" and any(prompt.rounding is not None for prompt in report.prompts)
    note = f" (in brackets: {_ITSELF})" if has_floor else ""
    top_k = report.prompts[0].against(against).top_k
    note += f" (over the {top_k} likeliest tokens that the program gives)" if top_k is not None else ""
    table = Table(title=f"{_TITLES[against]}{note}", title_justify="left")
    table.add_column("prompt")
    for column in ("tokens", "equal"):
        table.add_column(column, justify="right")
    table.add_column("first difference")
    for column in ("max margin", "max |Δlogit|", "mean |Δlogit|", "mean KL"):
        table.add_column(column, justify="right")
    for prompt in report.prompts:
        rounding = prompt.rounding if against == "quantized" else None
        table.add_row(*_row(prompt, prompt.against(against), rounding))
    return table


def _case_table(report: CheckReport, against: Against) -> Table:
    found = [case.against(against) for case in report.cases]
    table = Table(title=_TITLES[against], title_justify="left")
    table.add_column("case")
    ranked, pooled = found[0].equal_top1 is not None, found[0].cosine is not None
    columns = ["input", "rows", "max |Δ|", "mean |Δ|"]
    columns += ["same top 1", "same top 5"] * ranked + ["1 - cosine"] * pooled
    for column in columns:
        table.add_column(column, justify="right")
    for case, figures in zip(report.cases, found, strict=True):
        shape = " x ".join(map(str, next(iter(case.inputs.values()))))
        cells = [shape, str(figures.rows)]
        cells += [f"{figures.max_output_difference:.3g}", f"{figures.mean_output_difference:.3g}"]
        cells += [f"{each}/{figures.rows}" for each in (figures.equal_top1, figures.equal_top5) if each is not None]
        cells += [f"{1 - figures.cosine:.3g}"] if figures.cosine is not None else []
        table.add_row(escape(case.name), *cells)
    return table


def _row(prompt: PromptReport, comparison: Comparison, rounding: RoundingFigures | None) -> tuple[str, ...]:
    bound = "" if comparison.whole_vocabulary else "≥ "
    cells = (
        f"{comparison.equal_steps}/{comparison.steps}",
        _difference(comparison.differences[0]) if comparison.differences else "",
        f"{comparison.max_margin:.3g}" if comparison.differences else "",
        f"{comparison.max_logit_difference:.3g}",
        f"{comparison.mean_logit_difference:.3g}",
        f"{bound}{comparison.mean_kl:.3g}",
    )
    floors = _floors(rounding, comparison.steps, bound) if rounding is not None else ("",) * len(cells)
    both = (f"{cell} {floor}".strip() for cell, floor in zip(cells, floors, strict=True))
    return (escape(prompt.name), str(prompt.prompt_tokens), *both)


def _floors(rounding: RoundingFigures, steps: int, bound: str) -> tuple[str, ...]:
    """Beside each figure of a program, in brackets, that of the reference against itself."""
    return (
        f"({rounding.equal_steps}/{steps})",
        "",
        f"({rounding.max_margin:.3g})" if rounding.equal_steps < steps else "",
        f"({rounding.max_logit_difference:.3g})",
        f"({rounding.mean_logit_difference:.3g})",
        f"({bound}{rounding.mean_kl:.3g})",
    )


def _over_rounding(ratio: float) -> str:
    return f"mean KL over all steps: {ratio:.3g} times that of {_ITSELF}, which differs by rounding alone"


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
