"""The command line of the runners, and the one place where an error becomes a message and an exit code.

The commands import what they need when they run: the runtime takes seconds to import, and ``--help`` should not.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from runners.errors import CheckFailedError, UserError
from runners.quiet_libraries import quiet_libraries
from runners.terminal import prompt_text, write

if TYPE_CHECKING:
    from runners.bench import Workload
    from runners.bench_calls import CallsReport
    from runners.bench_report import BenchReport
    from runners.package import Package
    from runners.sampling import Sampling

TRACEBACK_VARIABLE = "PTELINE_TRACEBACK"
WITHOUT_CACHE = ("fill-mask", "embedding", "image-classification")  # as ``runners.caller.TASKS``, which loads slowly
WITH_ENCODER = ("speech-to-text", "text2text")  # as ``runners.encoder_decoder.TASKS``
WITH_IMAGES = "image-text-to-text"
EAGER_STEPS = 32  # greedy tokens a prompt of --eager

app = typer.Typer(
    name="pteline",
    help="Open, check, run and measure ExecuTorch packages.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

PackagePath = Annotated[Path, typer.Argument(metavar="PACKAGE", help="A package directory, as the build writes it.")]
Threads = Annotated[int | None, typer.Option(help="Threads of the runtime. Default: this process's physical cores.")]


@app.callback()
def options(
    traceback: Annotated[
        bool, typer.Option("--traceback", envvar=TRACEBACK_VARIABLE, help="Show where an error was raised.")
    ] = False,
) -> None:
    """Options that come before the command."""
    if traceback:
        os.environ[TRACEBACK_VARIABLE] = "1"
    else:
        os.environ.pop(TRACEBACK_VARIABLE, None)


def run_app(application: typer.Typer) -> None:
    """Run a command line and exit: 0 done, 1 a check failed, 2 bad input, 130 interrupted.

    A :class:`UserError` or :class:`CheckFailedError` is one message on standard error, with its traceback where
    ``--traceback`` or ``PTELINE_TRACEBACK`` asks for it. Anything else is a fault of the program and shows its own.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal that cannot show a character
    try:
        application()
    except (UserError, CheckFailedError) as error:
        sys.exit(_fail(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EPIPE):
            raise
        sys.exit(_fail(UserError(f"the output cannot be written ({error.strerror}): give it another place.")))


def _fail(error: UserError | CheckFailedError) -> int:
    if os.environ.get(TRACEBACK_VARIABLE):
        sys.excepthook(type(error), error, error.__traceback__)
    else:
        sys.stderr.write(f"error: {error}\n")
    return error.exit_code


@app.command()
def run(
    context: typer.Context,
    package: PackagePath,
    prompt: Annotated[str | None, typer.Argument(help="What to say; '-' reads standard input.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 512,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token (greedy).")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from this many of the likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that reach this probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest's probability.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Repeat the draws of an earlier run.")] = None,
    threads: Threads = None,
    system: Annotated[str | None, typer.Option(help="A system message for the chat template.")] = None,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Continue the prompt as it is, special tokens included, with no chat template."),
    ] = False,
    interactive: Annotated[bool, typer.Option("--interactive", "-i", help="Hold a conversation.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print tokens and speed after an answer.")] = False,
    speculate: Annotated[
        bool, typer.Option("--speculate", help="Guess repetitions and verify several tokens a call. Greedy only.")
    ] = False,
    audio: Annotated[Path | None, typer.Option(help="A WAV file, for a package that transcribes recordings.")] = None,
    image: Annotated[Path | None, typer.Option(help="A PNG or JPEG file, for a package that reads images.")] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON: the whole embedding, or the likeliest tokens or labels.")
    ] = False,
) -> None:
    """Answer a prompt, or hold a conversation (/reset, /exit; Ctrl-C stops an answer).

    Greedy by default: give --temperature to sample. The answer goes to standard output, everything else to standard
    error. Of a package without a cache: print a text's embedding, the tokens behind its masks, or an image's labels.
    """
    from runners.package import open_package
    from runners.run_command import RunOptions, command, require_effect
    from runners.sampling import Sampling

    sampling = Sampling(temperature, top_k, top_p, min_p, seed)
    opened = open_package(package)
    if opened.manifest.model.task in WITHOUT_CACHE:
        _refuse_given(context, opened, set(context.params) - {"package", "prompt", "threads", "image", "json"})
        write(_encoded(opened, prompt, image, threads, json=json))
        return
    _refuse_given(context, opened, {"json"} if opened.manifest.model.task == WITH_IMAGES else {"image", "json"})
    require_effect(sampling)
    if opened.manifest.model.task in WITH_ENCODER:
        _refuse_given(context, opened, {"system", "raw", "interactive", "speculate"})
        _answer(opened, prompt, audio, threads, sampling, max_new_tokens, stats=stats)
        return
    _refuse_given(context, opened, {"audio"})
    command(
        opened,
        RunOptions(
            prompt, image, system, raw, interactive, sampling, max_new_tokens, threads, stats=stats, speculate=speculate
        ),
    )


@app.command()
def bench(
    context: typer.Context,
    package: PackagePath,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 128,
    new_tokens: Annotated[int, typer.Option(help="Tokens decoded one by one after it.")] = 64,
    trials: Annotated[int, typer.Option(help="Trials that count.")] = 10,
    warmup: Annotated[int, typer.Option(help="Trials before them that do not.")] = 2,
    threads: Threads = None,
    at: Annotated[int | None, typer.Option(help="Measure decoding from this cache position on.")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")] = None,
    against: Annotated[
        Path | None, typer.Option(help="A second package, measured trial by trial in turn with the first.")
    ] = None,
    speculate: Annotated[
        bool,
        typer.Option("--speculate", help="Also measure speculation, on a repetitive and on a free text."),
    ] = False,
) -> None:
    """Measure loading, prefill and decoding, as median and percentiles of warm trials.

    Of packages without a cache: one call, of a text of 8 and of 128 tokens (or --prompt-tokens), or of an image.
    """
    from runners.bench import Workload
    from runners.files import require_writable, write_text
    from runners.package import open_package

    work = Workload(prompt_tokens, new_tokens, trials, warmup, at)
    if json is not None:
        require_writable(json)
    if speculate and against is not None:
        raise UserError("--speculate measures one package: leave --against out.")
    packages = [open_package(path) for path in (package, against) if path is not None]
    report: BenchReport | CallsReport
    if packages[0].manifest.model.task in WITHOUT_CACHE:
        _refuse_given(context, packages[0], {"new_tokens", "at", "speculate"})
        lengths = (prompt_tokens,) if _is_given(context, "prompt_tokens") else None
        report = _measure_calls(packages, lengths, trials, warmup, threads)
    else:
        report = _measure(packages, work, threads, speculate=speculate)
    if json is not None:
        write_text(json, report.model_dump_json(indent=2) + "\n")


@app.command()
def check(
    package: PackagePath,
    eager: Annotated[
        list[str],
        typer.Option(metavar="PROMPT", help="Run eager PyTorch here on a prompt of your own; may be repeated."),
    ] = [],  # noqa: B006  # typer reads the default, nothing writes it
    steps: Annotated[int | None, typer.Option(min=1, help="Greedy tokens a prompt, with --eager. Default: 32.")] = None,
    threads: Threads = None,
    json: Annotated[Path | None, typer.Option("--json", help="Also write the report to this file.")] = None,
) -> None:
    """Compare the program with what eager PyTorch said; exit code 1 where it breaks a limit of its configuration."""
    if steps is not None and not eager:
        raise UserError(
            f"--steps {steps} needs --eager: without it the steps are those that the build recorded (its check.steps). "
            "Add --eager PROMPT, or leave --steps out."
        )
    with quiet_libraries():
        from runners import check_command

        references = check_command.eager_references() if eager else None
    if references is not None:
        check_command.command_eager(package, eager, steps or EAGER_STEPS, references, threads, json)
    else:
        check_command.command(package, threads, json)


@app.command()
def inspect(
    target: Annotated[Path, typer.Argument(metavar="PACKAGE|FILE.pte", help="A package directory or a bare program.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Describe a package or a program: methods, operators, memory, cache, and whether the stock runner loads it."""
    with quiet_libraries():
        from runners import inspect as inspector

        inspector.command(target, json)


def _encoded(package: Package, prompt: str | None, image: Path | None, threads: int | None, *, json: bool) -> str:
    from runners.encode import command

    return command(package, None if prompt is None else prompt_text(prompt), image, threads, as_json=json)


def _answer(
    package: Package,
    prompt: str | None,
    audio: Path | None,
    threads: int | None,
    sampling: Sampling,
    max_new_tokens: int,
    *,
    stats: bool,
) -> None:
    from runners.answers import Writing, command
    from runners.sampling import Sampler

    writing = Writing(Sampler(sampling), max_new_tokens, write, Console(stderr=True), stats)
    command(package, None if prompt is None else prompt_text(prompt), audio, threads, writing)


def _refuse_given(context: typer.Context, package: Package, names: set[str]) -> None:
    """Refuse options of a command that the package's task would ignore."""
    given = [name for name in context.params if name in names and _is_given(context, name)]
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        task = package.manifest.model.task
        raise UserError(f"{options}: no effect on package '{package.manifest.name}' (task {task}). Leave it out.")


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _measure(packages: list[Package], work: Workload, threads: int | None, *, speculate: bool) -> BenchReport:
    from runners.bench import measure
    from runners.bench_report import show
    from runners.bench_speculation import measure_speculation, require_measurable
    from runners.machine import describe

    notes = Console(stderr=True)
    if speculate:
        require_measurable(packages[0], work)
    with notes.status("starting") as status:
        report = measure(packages, work, threads, describe(), status.update)
        if speculate:
            found = measure_speculation(packages[0], work, report.threads, status.update)
            report = report.model_copy(update={"speculation": found})
    show(report, Console())
    return report


def _measure_calls(
    packages: list[Package], lengths: tuple[int, ...] | None, trials: int, warmup: int, threads: int | None
) -> CallsReport:
    from runners.bench_calls import Calls, measure_calls, show_calls
    from runners.machine import describe

    calls = Calls(lengths, trials, warmup)
    with Console(stderr=True).status("loading") as status:
        report = measure_calls(packages, calls, threads, describe(), status.update)
    show_calls(report, Console())
    return report


def main() -> None:
    """The runners' own command line, for a machine that only runs packages."""
    run_app(app)


if __name__ == "__main__":
    main()
