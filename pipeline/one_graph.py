"""Say what to set where a model is not one graph for every number of tokens of a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from runners.errors import UserError

_VIOLATED = "Constraints violated (tokens)!"  # torch.export's words; the axis is named so by the plan of the task


@contextmanager
def one_graph(model: PreTrainedModel) -> Iterator[None]:
    """Within the scope the model is traced for any number of tokens.

    Raises:
        UserError: torch.export found that another number makes another graph.
    """
    try:
        yield
    except torch._dynamo.exc.UserError as error:
        _, violated, reason = str(error).partition(_VIOLATED)
        if not violated:
            raise
        found = " ".join(reason.split("- ", 1)[-1].split(". ")[0].split())
        raise UserError(
            f"export.max_prefill_length: {type(model).__name__} is not one graph for every number of tokens of a call; "
            f"set it to 1: a prompt is then fed token by token. torch.export says: {found}."
        ) from error
