"""Say in one message what no stage foresaw: an error of a library, or of a model's own code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from runners.errors import CheckFailedError, UserError

# What to do about an error of a stage, beside looking at it.
_TRY = {
    "load": "see that transformers itself loads this source",
    "quantize": "try quantize.linear, lm_head and embedding: none, to see whether a scheme does not fit the model",
    "register": "the model does not take a device's cache; another model of its family may",
    "export": "try export.max_prefill_length: 1 (a prompt is then fed token by token), or export.attention: portable",
    "lower": "try export.max_prefill_length: 1, export.attention: portable, or quantize.linear: none",
    "emit": "try export.attention: portable, or one method in export.methods",
    "draft": "the program was built and does not run: try export.attention: portable",
    "record": "eager PyTorch itself does not run the model along check.prompts; --no-check leaves them out",
}


@contextmanager
def explained(stage: str, model: Callable[[], str]) -> Iterator[None]:
    """Within the scope of a stage, turn an error that nobody foresaw into one of the user's, with its cause attached.

    Args:
        stage: its name.
        model: gives the name of the model's class, or of its source while it is not loaded.

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
        raise UserError(
            f"model: {model()} stops in the stage '{stage}' with {type(error).__name__}: {first_line(error)}. "
            f"To try: {_TRY[stage]}. 'pteline --traceback build …' shows where it was raised."
        ) from error


def first_line(error: Exception) -> str:
    """The first line of an error's message, without its full stop; the name of its type where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().removesuffix(".") if lines else type(error).__name__
