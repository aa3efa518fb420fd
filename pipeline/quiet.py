"""Keep transformers' progress bars and log lines out of the build's own output."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import modeling_gguf_pytorch_utils
from transformers.utils import logging


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Inside, transformers logs errors only and draws no bars. What it says of weights, the caller reports."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    gguf_bar = modeling_gguf_pytorch_utils.tqdm
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # the GGUF loader draws with a tqdm of its own, which no setting reaches
    modeling_gguf_pytorch_utils.tqdm = functools.partial(gguf_bar, disable=True)
    try:
        yield
    finally:
        modeling_gguf_pytorch_utils.tqdm = gguf_bar
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
