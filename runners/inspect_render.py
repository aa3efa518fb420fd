"""An inspection on the terminal: tables, one below the other, each left out where there is nothing to say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from runners.check_report import Against, CheckReport
from runners.inspection import Inspection
from runners.manifest import Cache, Manifest
from runners.pte import MethodDescription, ProgramDescription, TensorDescription
from runners.stock_contract import Verdict


def render(inspection: Inspection) -> RenderableType:
    """Everything but the configuration and the digests, which the JSON has."""
    parts: list[RenderableType] = [Text(_title(inspection), style="bold")]
    manifest = inspection.manifest
    if manifest is not None:
        parts.append(_pairs("Model", _model(manifest)))
    parts += _program(inspection.program)
    if manifest is not None and manifest.cache is not None:
        parts.append(_cache(manifest.cache, inspection))
    if manifest is not None:
        parts += _package(manifest)
    if inspection.check is not None:
        parts.append(_check(inspection.check))
    parts.append(_stock_runner(inspection.stock_runner))
    return Group(*parts)


def mebibytes(count: float) -> str:
    """Bytes for a reader."""
    return f"{count / 2**20:,.2f} MiB" if count >= 2**20 else f"{count / 2**10:,.1f} KiB"


def _title(inspection: Inspection) -> str:
    name = inspection.manifest.name if inspection.manifest is not None else inspection.path
    return f"{name}: program of {mebibytes(inspection.program.size)}"


def _pairs(title: str, pairs: Mapping[str, str]) -> Table:
    table = _table(title)
    for column in ("", ""):
        table.add_column(column, overflow="fold")
    for name, value in pairs.items():
        table.add_row(escape(name), escape(value))
    table.show_header = False
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold")


def _model(manifest: Manifest) -> dict[str, str]:
    model = manifest.model
    weights = "random" if model.random_weights else f"{model.parameters:,} parameters"
    vocabulary = f", vocabulary {model.vocabulary_size:,}" if model.vocabulary_size is not None else ""
    return {
        "source": model.source if model.revision is None else f"{model.source} at {model.revision}",
        "digest": model.digest,
        "architecture": f"{model.architecture}, {model.task}, {weights}{vocabulary}",
        "licence": model.licence or "unknown",
        "built by": manifest.created_by,
        **{f"quantization of {name}": value for name, value in manifest.quantization.items()},
    }


def _program(program: ProgramDescription) -> Iterator[RenderableType]:
    yield _methods(program)
    if any(method.operators for method in program.methods):
        yield _operators(program)
    if program.constants:
        values = {c.name: ", ".join(map(str, c.values)) for c in program.constants}
        yield _pairs("Constant methods", values)


def _methods(program: ProgramDescription) -> Table:
    table = _table("Methods")
    for column in ("method", "inputs", "outputs", "delegates", "planned memory"):
        table.add_column(column, overflow="fold")
    for method in program.methods:
        delegates = ", ".join(f"{use.count} {use.backend}" for use in method.delegates) or "none"
        planned = mebibytes(sum(method.planned_bytes))
        table.add_row(method.name, _signature(method.inputs), _signature(method.outputs), delegates, planned)
    return table


def _signature(values: tuple[TensorDescription, ...]) -> str:
    return escape("\n".join(_value(value) for value in values))


def _value(value: TensorDescription) -> str:
    bound = "≤ " if value.dynamic else ""
    shape = f" {bound}[{', '.join(map(str, value.shape))}]" if value.is_tensor else ""
    return f"{value.name + ' ' if value.name else ''}{value.dtype}{shape}"


def _operators(program: ProgramDescription) -> Table:
    table = _table("Operators outside delegates")
    table.add_column("operator", overflow="fold")
    for method in program.methods:
        table.add_column(method.name, justify="right")
    names = {use.name: None for method in program.methods for use in method.operators}
    for name in names:
        table.add_row(name, *(str(_count(method, name)) for method in program.methods))
    table.add_section()
    table.add_row("all", *(str(sum(use.count for use in method.operators)) for method in program.methods))
    return table


def _count(method: MethodDescription, name: str) -> int:
    return sum(use.count for use in method.operators if use.name == name)


def _cache(cache: Cache, inspection: Inspection) -> Table:
    table = _table(f"Cache: {cache.placement}, {cache.attention} attention, {cache.max_length} positions")
    for column in ("kind", "tensors", "shape", "bytes"):
        table.add_column(column, justify="left" if column in ("kind", "shape") else "right")
    for kind in inspection.cache:
        table.add_row(kind.kind, str(kind.tensors), escape("\n".join(kind.shapes)), mebibytes(kind.bytes))
    table.add_section()
    table.add_row("all", str(len(cache.tensors)), "", mebibytes(cache.bytes))
    return table


def _package(manifest: Manifest) -> Iterator[RenderableType]:
    yield _pairs("Files", {name: mebibytes(entry.size) for name, entry in manifest.files.items()})
    yield _pairs("Versions", manifest.versions)
    if manifest.timings:
        yield _timings(manifest)


def _timings(manifest: Manifest) -> Table:
    table = _table("Build")
    for column in ("stage", "seconds", "CPU seconds", "peak memory", ""):
        table.add_column(column, justify="left" if column in ("stage", "") else "right")
    for stage, figure in manifest.timings.items():
        remark = "from the stage cache" if figure.cached else ""
        seconds, cpu = f"{figure.seconds:.1f}", f"{figure.cpu_seconds:.1f}"
        table.add_row(escape(stage), seconds, cpu, mebibytes(figure.peak_bytes), remark)
    return table


def _check(report: CheckReport) -> Table:
    verdict = "passed" if report.passed else "FAILED: " + "; ".join(found.message for found in report.violations)
    pairs = {"verdict": verdict}
    references: tuple[Against, ...] = ("quantized", "unquantized")
    for against in references:
        pairs[f"against eager {against}"] = _figures(report, against)
    return _pairs("Check", pairs)


def _figures(report: CheckReport, against: Against) -> str:
    figures = []
    if report.prompts:
        comparisons = [prompt.against(against) for prompt in report.prompts]
        equal = sum(comparison.tokens_equal for comparison in comparisons)
        figures.append(f"tokens equal on {equal} of {len(comparisons)} prompts")
        figures.append(f"max |Δlogit| {max(c.max_logit_difference for c in comparisons):.3g}")
        figures.append(f"mean KL at most {max(c.mean_kl for c in comparisons):.3g} nats")
    if report.perplexity is not None:
        figures.append(f"perplexity ratio {report.perplexity.ratio(against):.4f}")
    return ", ".join(figures)


def _stock_runner(verdict: Verdict) -> Table:
    pairs = {"loads": "yes" if verdict.loads else "no"}
    pairs |= {f"reason {number}": reason for number, reason in enumerate(verdict.reasons, 1)}
    pairs |= {f"note {number}": note for number, note in enumerate(verdict.notes, 1)}
    return _pairs("Stock LLM runner", pairs)
