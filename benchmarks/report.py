"""A run as tables: on the terminal, and as Markdown in the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.records import BuildCost, PeerFigures, Point, Report
from runners.bench_report import Ratio
from runners.errors import UserError

BEGIN = "<!-- measured: begin (written by `make bench`) -->"
END = "<!-- measured: end -->"
_NONE = "-"
_DISTURBED = 0.02  # share of processor time that idle workers may take before the report says so


@dataclass(frozen=True)
class Grid:
    """A table of texts."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def heading(report: Report) -> list[str]:
    """The machine and the work, a line each."""
    machine = report.machine
    bandwidth = f", reads memory at {report.bandwidth.median / 1e9:.1f} GB/s" if report.bandwidth else ""
    return [
        f"{machine.cpu} ({', '.join(machine.flags)}), {machine.physical_cores} cores, "
        f"{machine.memory_bytes / 2**30:.0f} GiB{bandwidth}; load average before it {machine.load_average:.2f}.",
        f"{report.when}: {report.rounds} rounds after {report.warmup} of warm-up, {report.threads} threads, "
        f"{report.decode_tokens} tokens decoded at each position.",
    ]


def grids(report: Report) -> list[Grid]:
    """Every table of the report."""
    subjects = list(dict.fromkeys(each.subject for each in report.comparisons))
    return [
        *(_ratios(report, subject) for subject in subjects),
        _speeds(report),
        _shares(report),
        _models(report),
        _memory(report),
        _builds(report),
        _versions(report),
    ]


def notes(report: Report) -> list[str]:
    """Peers that did not take part, and what disturbed the measurement."""
    disturbed = [peer for peer in report.peers if peer.idle_share > _DISTURBED]
    few = any(each.ratio.low is None for each in report.comparisons)
    return [
        *(f"{each.name} did not take part: {each.reason}" for each in report.failures),
        *(
            f"While {peer.name} was measured, idle workers took {peer.idle_share:.0%} of its time."
            for peer in disturbed
        ),
        *(["Too few rounds for intervals."] if few else []),
    ]


def show(report: Report, console: Console) -> None:
    """Print the report."""
    for line in heading(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for grid in grids(report):
        table = Table(title=Text(grid.title), title_justify="left")
        for number, name in enumerate(grid.header):
            table.add_column(name, justify="left" if number == 0 else "right")
        for row in grid.rows:
            table.add_row(*map(Text, row))
        console.print(table)
    for line in notes(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def markdown(report: Report) -> str:
    """The report as Markdown."""
    parts = [" ".join(heading(report))]
    for grid in grids(report):
        rule = "|".join(["---", *["---:"] * (len(grid.header) - 1)])
        lines = [f"| {' | '.join(row)} |" for row in (grid.header, *grid.rows)]
        parts.append("\n".join([f"**{grid.title}**", "", lines[0], f"|{rule}|", *lines[1:]]))
    if found := notes(report):
        parts.append("\n".join(f"- {line}" for line in found))
    return "\n\n".join(parts) + "\n"


def write_into(file: Path, report: Report) -> None:
    """Put the report between the two marks of a Markdown file.

    Raises:
        UserError: the file cannot be read, or has not both marks, each once and in order.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{file}: cannot be read ({error.strerror}); expected a Markdown file with two marks"
        ) from error
    require_marks(file, text)
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    temporary = file.with_name(f".{file.name}.new")
    temporary.write_text(f"{before}{BEGIN}\n\n{markdown(report)}\n{END}{after}", encoding="utf-8")
    temporary.replace(file)


def require_marks(file: Path, text: str) -> None:
    """Both marks, each once and in order.

    Raises:
        UserError: they are not.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise UserError(f"{file}: expected the lines '{BEGIN}' and '{END}', each once and in this order; add them")


def _points(peers: Sequence[PeerFigures]) -> list[Point]:
    points = dict.fromkeys(speed.point for peer in peers for speed in peer.speeds)
    return sorted(points, key=lambda point: (point.kind == "decode", point.position))


def _ratios(report: Report, subject: str) -> Grid:
    found = [each for each in report.comparisons if each.subject == subject]
    others = list(dict.fromkeys(each.other for each in found))
    points = [point for point in _points(report.peers) if any(each.point == point for each in found)]
    cells = {(each.other, each.point): _interval(each.ratio) for each in found}
    rows = tuple((other, *(cells.get((other, point), _NONE) for point in points)) for other in others)
    header = ("against", *(point.label for point in points))
    return Grid(f"{subject}: times as fast (median of the rounds, 95% interval)", header, rows)


def _interval(found: Ratio) -> str:
    if found.low is None or found.high is None:
        return f"{found.median:.2f}"
    return f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f})"


def _speeds(report: Report) -> Grid:
    points = _points(report.peers)
    rows = []
    for peer in report.peers:
        found = {speed.point: f"{speed.tokens_per_second.median:.1f}" for speed in peer.speeds}
        rows.append((peer.name, *(found.get(point, _NONE) for point in points)))
    return Grid("tokens a second (medians)", ("", *(point.label for point in points)), tuple(rows))


def _shares(report: Report) -> Grid:
    points = [point for point in _points(report.peers) if point.kind == "decode"]
    rows = []
    for peer in report.peers:
        shares = {speed.point: speed.bandwidth_share for speed in peer.speeds}
        cells = (shares.get(point) for point in points)
        rows.append((peer.name, *(_NONE if share is None else f"{share:.0%}" for share in cells)))
    title = "decode: weights and cache read, over what the memory could give in that time"
    return Grid(title, ("", *(point.label for point in points)), tuple(rows))


def _models(report: Report) -> Grid:
    rows = tuple(
        (
            peer.name,
            peer.weights,
            f"{peer.step_bytes / 1e6:.0f} MB",
            f"{peer.cache_bytes / 1e3:.1f} kB",
            _NONE if peer.perplexity is None else f"{peer.perplexity:.2f}",
        )
        for peer in report.peers
    )
    perplexity = f"perplexity ({report.perplexity_tokens} tokens by {report.perplexity_window})"
    return Grid("models", ("", "weights", "read a token", "cache a position", perplexity), rows)


def _versions(report: Report) -> Grid:
    rows = tuple((peer.name, ", ".join(map(" ".join, peer.versions.items()))) for peer in report.peers)
    return Grid("versions", ("", "installed"), rows)


def _memory(report: Report) -> Grid:
    rows = tuple(
        (
            peer.name,
            f"{peer.peak_bytes / 2**20:.0f} MiB",
            f"{peer.imports_bytes / 2**20:.0f} MiB",
            f"{(peer.file_bytes + peer.cache_bytes * peer.max_length) / 2**20:.0f} MiB",
            f"{peer.memory_over_model:.2f}",
            f"{peer.own_memory_over_model:.2f}",
        )
        for peer in report.peers
    )
    header = ("", "peak", "of it imports", "file + cache", "peak over file + cache", "the same without imports")
    return Grid("memory of the worker", header, rows)


def _builds(report: Report) -> Grid:
    rows = tuple((peer.name, *_build(peer.build)) for peer in report.peers if peer.build is not None)
    return Grid("making the model", ("", "processor time", "peak memory", "note"), rows)


def _build(cost: BuildCost | None) -> tuple[str, str, str]:
    assert cost is not None, "rows without a build are left out"
    return f"{cost.cpu_seconds:.0f} s", f"{cost.peak_bytes / 2**30:.2f} GiB", cost.note
