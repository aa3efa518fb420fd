"""Keep the libraries' start-up notes and deprecation warnings, which no user can act on, out of our own output."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_NOISY = r"(torch|torchao|executorch|transformers|copyreg|coremltools)(\..*)?"


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Inside, log lines below ERROR and the libraries' own Python warnings are not shown; this project's are."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=_NOISY)
        warnings.filterwarnings("ignore", category=FutureWarning)
        try:
            yield
        finally:
            logging.disable(before)
