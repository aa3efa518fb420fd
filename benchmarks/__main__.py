"""``python -m benchmarks``: the command line."""

from __future__ import annotations

import shlex
import sys
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from tokenizers import Tokenizer

from benchmarks.bandwidth import in_a_process
from benchmarks.errors import PeerError
from benchmarks.figures import Measured, comparisons_of, failures_of, peers_of
from benchmarks.peer import Peer, Source, Workspace
from benchmarks.peers import others, own
from benchmarks.records import Report
from benchmarks.report import require_marks, show, write_into
from benchmarks.run import Plan, longest, run, windows_of
from benchmarks.schedule import Work
from benchmarks.source import CONFIG, source_of
from pipeline.sources.cached import cache_directory
from runners.bench import token_ids
from runners.bench_report import spread
from runners.errors import UserError
from runners.machine import Machine, describe, physical_cores

_TEXT = CONFIG.parent / "texts" / "austen.txt"
_WIDTH = 140  # of the tables where the output is no terminal
_PACKAGES = [Path(f"dist/smollm2_135m_{name}") for name in ("8da4w", "8da4w_all", "8da8w")]


def main(
    package: Annotated[list[Path], typer.Option(help="A package of this project; again for more.")] = _PACKAGES,
    long: Annotated[list[Path], typer.Option(help="A package with a long cache, at --long-at besides.")] = [],  # noqa: B006
    peer: Annotated[
        list[str], typer.Option(help="Only this peer; again for more. 'none': no peer. Default: all.")
    ] = [],  # noqa: B006
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds; fewer than 5 give no intervals.")] = 15,
    warmup: Annotated[int, typer.Option(min=0)] = 2,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 128,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens decoded at each position.")] = 32,
    at: Annotated[list[int], typer.Option(min=1, help="A decode position; again for more.")] = [128, 512, 1000],  # noqa: B006
    long_at: Annotated[list[int], typer.Option(min=1, help="The same, for --long alone.")] = [2000, 8000],  # noqa: B006
    max_length: Annotated[int, typer.Option(min=2, help="Positions of the peers' caches.")] = 2048,
    threads: Annotated[int, typer.Option(min=0, help="0: physical cores.")] = 0,
    perplexity: Annotated[
        int, typer.Option(min=0, help="Tokens of text whose perplexity is measured; 0: none.")
    ] = 4096,
    window: Annotated[int, typer.Option(min=2)] = 512,
    slow: Annotated[bool, typer.Option("--slow", help="Also build models that take many minutes.")] = False,
    prepare_only: Annotated[bool, typer.Option("--prepare-only", help="Install and build, measure nothing.")] = False,
    json: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("dist/benchmarks.json"),
    write: Annotated[Path | None, typer.Option(help="A Markdown file whose marked place gets the tables.")] = None,
) -> None:
    """Measure this project's packages and its peers in turn, and print ratios with intervals."""
    console = Console(stderr=True)
    if write is not None:
        require_marks(write, write.read_text(encoding="utf-8") if write.is_file() else "")
    chosen = [*own(package, long, tuple(long_at)), *_chosen(peer)]
    workspace = _workspace(threads or physical_cores(), max_length, slow, console)
    if prepare_only:
        _prepare(chosen, workspace, console)
        return
    machine = describe()
    source = workspace.source()
    tokenizer = Tokenizer.from_file(str(source.folder / "tokenizer.json"))
    ids = tuple(token_ids(longest(at, chosen, tokens), tokenizer.get_vocab_size()))
    work = Work(prompt, tokens, rounds, warmup, ids)
    text = windows_of(tokenizer.encode(_TEXT.read_text(encoding="utf-8")).ids, perplexity, window)
    measured = run(chosen, Plan(work, tuple(at), text), workspace, lambda: in_a_process(workspace.threads))
    report = _report(measured, machine, workspace.threads, [each.name for each in own(package, long, ())], window, text)
    show(report, Console(width=None if sys.stdout.isatty() else _WIDTH))
    json.parent.mkdir(parents=True, exist_ok=True)
    json.write_text(report.model_dump_json(indent=2) + "\n")
    if write is not None:
        write_into(write, report)


def _chosen(names: list[str]) -> list[Peer]:
    known = others()
    if names == ["none"]:
        return []
    for name in names:
        if name not in known:
            raise UserError(f"--peer {name!r}: no such peer; expected one of: {', '.join(known)}, or 'none'")
    return [known[name] for name in names] if names else list(known.values())


def _workspace(threads: int, max_length: int, slow: bool, console: Console) -> Workspace:
    root = cache_directory() / "benchmarks"

    @cache
    def source() -> Source:
        return source_of(CONFIG, root)

    return Workspace(root, source, threads, max_length, slow, lambda what: console.print(what, style="dim"))


def _prepare(peers: list[Peer], workspace: Workspace, console: Console) -> None:
    """Install and build, and say who is ready."""
    for peer in peers:
        workspace.progress(f"preparing {peer.name}")
        try:
            peer.prepare(workspace)
        except PeerError as error:
            console.print(f"{peer.name}: {error}", markup=False)
        else:
            console.print(f"{peer.name}: ready", markup=False)


def _report(
    measured: Measured,
    machine: Machine,
    threads: int,
    subjects: list[str],
    window: int,
    text: tuple[tuple[int, ...], ...],
) -> Report:
    work, bandwidth = measured.work, measured.trials.bandwidth
    return Report(
        machine=machine,
        when=datetime.now(timezone.utc).isoformat(timespec="minutes"),
        command=shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        threads=threads,
        rounds=work.rounds,
        warmup=work.warmup,
        decode_tokens=work.decode_tokens,
        perplexity_tokens=sum(map(len, text)),
        perplexity_window=window,
        bandwidth=spread(bandwidth) if bandwidth else None,
        peers=peers_of(measured),
        failures=failures_of(measured),
        comparisons=comparisons_of(measured, subjects),
    )


def command() -> None:
    """Run the command line; bad input and a missing source are one line, and exit code 2."""
    try:
        typer.run(main)
    except (UserError, PeerError) as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    command()
