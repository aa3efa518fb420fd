"""Say in one message what no stage foresaw: an error of a library, or of a model's own code."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from pipeline.tasks.settings import reads
from runners.errors import CheckFailedError, UserError

_PORTABLE = ("export.attention", "export.attention: portable")
_TOKEN_BY_TOKEN = ("export.max_prefill_length", "export.max_prefill_length: 1 (a prompt is then fed token by token)")

# What to do about an error of a stage, beside looking at it; before each, the key that a task must read for it.
_TRY: dict[str, tuple[tuple[str | None, str], ...]] = {
    "load": ((None, "see that transformers itself loads this source"),),
    "quantize": (
        ("quantize.linear", "quantize.linear: none, to see whether a scheme does not fit the model"),
        ("quantize.lm_head", "quantize.lm_head: none"),
        ("quantize.embedding", "quantize.embedding: none"),
    ),
    "register": (("cache.max_length", "another model of its family: this one does not take a device's cache"),),
    "export": (_TOKEN_BY_TOKEN, _PORTABLE),
    "lower": (_TOKEN_BY_TOKEN, _PORTABLE, ("quantize.linear", "quantize.linear: none")),
    "emit": (_PORTABLE, ("export.methods", "one method in export.methods")),
    "draft": (_PORTABLE,),
    "record": ((None, "--no-check, which leaves out what eager PyTorch itself does not run"),),
}


@contextmanager
def explained(stage: str, model: Callable[[], str], used: Callable[[], Collection[str]]) -> Iterator[None]:
    """Within the scope of a stage, turn an error that nobody foresaw into one of the user's, with its cause attached.

    Args:
        stage: its name.
        model: gives the name of the model's class, or of its source while it is not loaded.
        used: gives the dotted keys that the model's task reads, of those that some tasks read and others do not; none
            while it is not known.

    Raises:
        UserError: something else was raised inside. What the system says of a file (no space, no permission) is passed
            on as it is.
    """
    try:
        yield
    except (UserError, CheckFailedError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        hints = "; ".join(hints_of(stage, used()))
        raise UserError(
            f"model: {model()} stops in the stage '{stage}' with {type(error).__name__}: {first_line(error)}. "
            f"{f'To try: {hints}. ' if hints else ''}'pteline --traceback build …' shows where it was raised."
        ) from error


def hints_of(stage: str, used: Collection[str]) -> list[str]:
    """What to try about an error of ``stage`` where a task reads ``used``; it may be nothing."""
    return [hint for key, hint in _TRY[stage] if key is None or reads(used, key)]


def first_line(error: Exception) -> str:
    """The first line of an error's message, without its full stop; the name of its type where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().removesuffix(".") if lines else type(error).__name__
