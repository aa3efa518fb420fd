"""Whether a model says the same with a device's cache as with transformers' own, before anything is exported.

A device's cache returns all its places, also those that no token took yet, and leaves them to the mask. Some models
have code of their own that takes the number of places for the number of tokens, or that is not causal. V vocabulary, n
tokens.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from pipeline.attention import Attention, attention_of
from pipeline.caches import DeviceCache
from pipeline.caches.own_states import StateKeeping
from pipeline.positions import given_positions
from runners.errors import UserError
from runners.runtime import native_log

_TOKENS = 3  # fed one by one: the first alone, then some that see others
# Of the largest difference of a logit, in standard deviations of the logits: models that are wrong are off by more than
# 1, rounding (of quantized activations too) by much less than this.
_BOUND = 0.1


def require_agreement(
    model: PreTrainedModel, cache_name: str, keeping: StateKeeping, cache: DeviceCache, attention: Attention
) -> None:
    """Feed a few tokens both ways.

    Args:
        model: as it will be traced.
        cache_name: keyword of its forward.
        keeping: gives the model's own cache.
        cache: empty, of one row; it is written.
        attention: that goes with it.

    Raises:
        UserError: the logits differ.
    """
    count = min(_TOKENS, cache.max_length)
    size = model.get_input_embeddings().num_embeddings
    ids = torch.randint(size, (count,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = _own(model, cache_name, keeping, ids)
    quiet = native_log()  # of kernels that here run outside a program, and say so
    with torch.inference_mode(), attention_of(model, attention), given_positions(model, cache_name), quiet:
        said = _device(model, cache_name, cache, ids)
    difference = ((said - expected).abs().max() / expected.std().clamp(min=1e-9)).item()
    if not difference <= _BOUND:
        raise UserError(
            f"model: {type(model).__name__} says something else with a device's cache than with transformers' own "
            f"(logits differ by {difference:.2g} standard deviations): its own code masks by the cache's length, or is "
            "not causal (is_decoder). It cannot be built for this task."
        )


def _own(model: PreTrainedModel, cache_name: str, keeping: StateKeeping, ids: torch.Tensor) -> torch.Tensor:
    """Logits ``[n, V]`` with transformers' cache."""
    own = keeping.new_cache(model)
    steps = [model(input_ids=token.view(1, 1), use_cache=True, **{cache_name: own}).logits[0, -1] for token in ids]
    return torch.stack(steps)


def _device(model: PreTrainedModel, cache_name: str, cache: DeviceCache, ids: torch.Tensor) -> torch.Tensor:
    """Logits ``[n, V]`` with a device's cache."""
    steps = []
    for position, token in enumerate(ids):
        cache.position = torch.tensor([position])
        steps.append(model(input_ids=token.view(1, 1), **{cache_name: cache}).logits[0, -1])
    return torch.stack(steps)
