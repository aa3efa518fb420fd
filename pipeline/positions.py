"""Positions for models that would count their tokens in a way that no graph can hold.

Legend: B batch, S tokens of a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

# These sum up a mask that is as long as all tokens so far, a length that is known only when the program runs.
_COUNT_BY_MASK = frozenset({"opt"})


@contextmanager
def given_positions(model: PreTrainedModel, cache_name: str | None) -> Iterator[None]:
    """Inside the scope, such a model is told the positions of its tokens, as ``position_ids``; others are left alone.

    Args:
        model: its ``forward`` takes ``input_ids`` int64 ``[B, S]`` and a device cache by keyword.
        cache_name: of that keyword; None: there is no cache, so its own count will do.
    """
    if cache_name is None or model.config.model_type not in _COUNT_BY_MASK:
        yield
        return

    def tell(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[object, dict[str, object]]:
        if kwargs.get("position_ids") is not None:  # rows of a batch are told theirs already
            return args, kwargs
        tokens, start = kwargs["input_ids"], kwargs[cache_name].position  # type: ignore[attr-defined]
        assert isinstance(tokens, torch.Tensor)
        return args, {**kwargs, "position_ids": torch.arange(tokens.shape[1])[None] + start[:, None]}

    hook = model.register_forward_pre_hook(tell, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
