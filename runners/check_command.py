"""``pteline check``: open a package, replay its goldens, print and write the report, fail where the limits say so."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from rich.console import Console

from runners.caller import TASKS, Caller
from runners.check import FullLogits, Progress, check, judged, repeats
from runners.check_cases import cases_repeat, replay_cases
from runners.check_limits import refuse_unmeasurable
from runners.check_render import show
from runners.check_report import (
    CheckReport,
    Limits,
    QuantizedLimits,
    limits_from_config,
    quantized_limits_from_config,
    write_report,
)
from runners.encoder_decoder import TASKS as WITH_ENCODER
from runners.encoder_decoder import Seq2SeqSession, open_session
from runners.errors import CheckFailedError, UserError
from runners.files import require_writable
from runners.goldens import Goldens, load
from runners.package import Package, open_package
from runners.session import Session

EAGER_GROUP = "pteline.eager"
_BROKEN_BY_A_TIE = ("min_equal_prompts", "max_margin", "max_kl_over_rounding")


class EagerReferences(Protocol):
    """Runs eager PyTorch on a user's own prompts: the pipeline's side of ``--eager``, for the runners have no model."""

    def __call__(self, package: Package, prompts: Sequence[str], steps: int) -> tuple[Goldens, FullLogits]:
        """Goldens of the prompts, greedily decoded for ``steps`` tokens, and both references' whole logits."""
        ...


def eager_references() -> EagerReferences:
    """What runs eager PyTorch on this machine: an entry point, for a device has none.

    Raises:
        UserError: nothing installed offers it.
    """
    found = list(entry_points(group=EAGER_GROUP))
    if not found:
        raise UserError("--eager needs the half of pteline that builds packages, which is not installed here.")
    references: EagerReferences = found[0].load()
    return references


def command(package: Path, threads: int | None = None, json: Path | None = None) -> None:
    """``pteline check PACKAGE [--threads N] [--json FILE]``: replay the goldens that the package carries.

    Raises:
        UserError: the package is damaged, carries no goldens, or the report cannot be written.
        CheckFailedError: the program breaks a limit of the package's configuration.
    """
    opened = _open(package, json)
    if opened.goldens_path is None:
        raise UserError(
            f"{package}: the package carries no goldens: it was built with --no-check. Build it again without, or give "
            "prompts of your own with --eager."
        )
    goldens = load(opened.goldens_path)
    _conclude(_replay(opened, goldens, None, threads), json)


def command_eager(
    package: Path,
    prompts: Sequence[str],
    steps: int,
    references: EagerReferences,
    threads: int | None = None,
    json: Path | None = None,
) -> None:
    """``pteline check PACKAGE --eager``: check prompts of the user's own against eager PyTorch, run here and now.

    The limits are the package's. That on perplexity is left out, for no text is run; and where rounding alone moves
    the reference (it has a rounding floor), so are those that one near tie can break: prompts of the user's own may
    hold any number of them. The figures stand beside those of rounding all the same.

    Args:
        package: The package directory.
        prompts: Texts; at least one.
        steps: Greedy tokens a prompt.
        references: Runs the models.
        threads: Of the runtime.
        json: Where the report goes.

    Raises:
        UserError: the package or a prompt cannot be used.
        CheckFailedError: the program breaks a limit of the package's configuration.
    """
    if any(not prompt.strip() for prompt in prompts):
        raise UserError("--eager: the prompt is empty; give some text.")
    opened = _open(package, json)
    if opened.manifest.model.task in (*TASKS, *WITH_ENCODER):
        raise UserError(
            f"--eager decodes prompts, and {package} is for {opened.manifest.model.task}: add your texts, recordings "
            "or images to check.prompts, check.audio or check.images of its configuration, and build it again."
        )
    goldens, full = references(opened, prompts, steps)
    ties = _BROKEN_BY_A_TIE if any(prompt.rounding is not None for prompt in goldens.prompts) else ()
    _conclude(_replay(opened, goldens, full, threads, left_out=("max_perplexity_ratio", *ties)), json)


def _open(package: Path, json: Path | None) -> Package:
    if json is not None:
        require_writable(json)
    return open_package(package)


def package_limits(package: Package) -> tuple[QuantizedLimits, Limits]:
    """The limits that a package's configuration sets, against the quantized and against the unquantized reference.

    Raises:
        UserError: the configuration's ``check`` section is not one.
    """
    settings = package.manifest.config.get("check") or {}
    if not isinstance(settings, dict):
        raise UserError(f"{package.path}: the manifest's config.check is {settings!r}, expected a mapping")
    return quantized_limits_from_config(settings), limits_from_config(settings, "unquantized")


def _replay(
    package: Package,
    goldens: Goldens,
    full: FullLogits | None,
    threads: int | None,
    *,
    left_out: tuple[str, ...] = (),
) -> CheckReport:
    quantized, unquantized = package_limits(package)
    quantized = quantized.model_copy(update=dict.fromkeys(left_out))
    unquantized = unquantized.model_copy(update=dict.fromkeys(set(left_out) & set(Limits.model_fields)))
    with Console(stderr=True).status("loading") as status:
        return replay(package, goldens, quantized, unquantized, full, threads, status.update)


def replay(
    package: Package,
    goldens: Goldens,
    quantized: QuantizedLimits,
    unquantized: Limits,
    full: FullLogits | None,
    threads: int | None,
    progress: Progress,
) -> CheckReport:
    """Load a package's program and check it: on one thread whether it repeats itself, on ``threads`` all else.

    Raises:
        UserError: the program does not load, or the goldens do not fit it.
    """
    if goldens.cases:
        return _replay_cases(package, goldens, quantized, unquantized, threads, progress)
    single = _session(package, threads=1)
    if isinstance(single, Session) and single.top_k is not None:
        goldens = dataclasses.replace(goldens, text=None)  # perplexity takes the logits of every token
    _require_room(goldens, single.max_length)
    progress("the first prompt before and after another one")
    repeatable = repeats(single, goldens)
    del single  # the size of the thread pool is fixed while a program is loaded
    session = _session(package, threads)
    verifier = session if isinstance(session, Session) and session.max_verify else None
    return check(session, goldens, quantized, unquantized, full, progress, repeatable=repeatable, verifier=verifier)


def _session(package: Package, threads: int | None) -> Session | Seq2SeqSession:
    """A session whose calls are those that an app's runner makes: the whole prompt at once."""
    session = open_session(package, threads)
    if isinstance(session, Session):
        session.feed_prompts_whole()
    return session


def _replay_cases(
    package: Package,
    goldens: Goldens,
    quantized: QuantizedLimits,
    unquantized: Limits,
    threads: int | None,
    progress: Progress,
) -> CheckReport:
    """As :func:`replay`, of a program without a cache."""
    refuse_unmeasurable(goldens, quantized, unquantized)
    single = Caller.open(package, threads=1)
    progress("the first case before and after another one")
    repeatable = cases_repeat(single, goldens.cases)
    del single  # the size of the thread pool is fixed while a program is loaded
    reports = replay_cases(Caller.open(package, threads), goldens.cases, package.manifest.pooling, progress)
    return judged(
        CheckReport(
            passed=False,
            prompts=(),
            perplexity=None,
            repeatable=repeatable,
            kl_over_rounding=None,
            limits_quantized=quantized,
            limits_unquantized=unquantized,
            violations=(),
            cases=reports,
        )
    )


def _require_room(goldens: Goldens, max_length: int) -> None:
    """Refuse goldens that need more cache positions than the program has: the last of N tokens is never fed."""
    needs = {f"prompt {p.name}": p.prompt_ids.shape[0] + p.forced.shape[0] - 1 for p in goldens.prompts}
    if goldens.text is not None:
        needs["the window of perplexity"] = min(goldens.text.window, goldens.text.ids.shape[0]) - 1
    for what, positions in needs.items():
        if positions > max_length:
            raise UserError(
                f"{what} takes {positions} cache positions, the program has {max_length}; shorten it (check.steps, "
                "check.long_prompt, check.perplexity.window) or build with a larger cache.max_length"
            )


def _conclude(report: CheckReport, json: Path | None) -> None:
    """The report is written before the verdict is spoken: a failed check is when it is wanted most."""
    if json is not None:
        write_report(report, json)
    show(report, Console())
    if not report.passed:
        raise CheckFailedError("the check failed:\n" + "\n".join(f"  {found.message}" for found in report.violations))
