"""Whether a model says the same with a device's cache as with transformers' own, before anything is exported.

A device's cache returns all its places, also those that no token took yet, and leaves them to the mask. Some models
have code of their own that takes the number of places for the number of tokens, or that is not causal. V vocabulary, n
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from pipeline.attention import Attention, attention_of
from pipeline.caches import DeviceCache, DeviceEncoderDecoderCache
from pipeline.caches.own_states import StateKeeping
from pipeline.positions import given_positions
from pipeline.quantization.reference import quantizes_activations
from runners.errors import UserError
from runners.runtime import native_log

_TOKENS = 3  # fed one by one: the first alone, then some that see others
_LONGEST_WINDOW = 64  # that is crossed: one of thousands of tokens would take longer than the rest of a build
_BEYOND = 2  # tokens after a window is full
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
    ids = _random_ids(model.get_input_embeddings().num_embeddings, tokens_fed(cache))
    with torch.inference_mode():
        expected = _own(model, cache_name, keeping, ids)
    quiet = native_log()  # of kernels that here run outside a program, and say so
    with torch.inference_mode(), attention_of(model, attention), given_positions(model, cache_name), quiet:
        said = _device(model, cache_name, cache, ids)
    _require_close(model, said, expected, "its own code masks by the cache's length, or is not causal (is_decoder)")


def require_agreement_with_encoder(
    model: PreTrainedModel, cache_name: str, argument: str, longest: torch.Tensor, cache: DeviceEncoderDecoderCache
) -> None:
    """Read an input and feed the decoder a few tokens both ways; of quantized activations nothing is required.

    Args:
        model: as it will be traced.
        cache_name: keyword of its forward.
        argument: keyword of what its encoder reads.
        longest: an input of the largest size; other values of its type and shape are read.
        cache: empty; it is written.

    Raises:
        UserError: the logits differ.
    """
    ids = _random_ids(model.config.get_text_config(decoder=True).vocab_size, tokens_fed(cache.self_attention_cache))
    given = {argument: _random_input(model, longest)}
    with torch.inference_mode():
        expected = _own_answer(model, cache_name, given, ids)
    with torch.inference_mode(), attention_of(model, "portable"):
        said = _device_answer(model, cache_name, given, cache, ids)
    if quantizes_activations(model):
        return  # to noise, which an encoder hears here, each rounding is one more: they hide what is compared
    _require_close(model, said, expected, "its own code masks by the cache's length, or keeps something beside it")


def tokens_fed(cache: DeviceCache) -> int:
    """Return how many tokens are compared: a few, or some more than the smallest window where that is short."""
    window = min((layer.max_cache_len for layer in cache.layers if getattr(layer, "is_sliding", False)), default=0)
    count = max(_TOKENS, window + _BEYOND) if window <= _LONGEST_WINDOW else _TOKENS
    return min(count, cache.max_length)


def _require_close(model: PreTrainedModel, said: torch.Tensor, expected: torch.Tensor, why: str) -> None:
    difference = ((said - expected).abs().max() / expected.std().clamp(min=1e-9)).item()
    if not difference <= _BOUND:
        raise UserError(
            f"model: {type(model).__name__} says something else with a device's cache than with transformers' own "
            f"(logits differ by {difference:.2g} standard deviations): {why}. It cannot be built for this task."
        )


def _random_ids(vocabulary: int, count: int) -> torch.Tensor:
    return torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(0))


def _random_input(model: PreTrainedModel, like: torch.Tensor) -> torch.Tensor:
    if like.is_floating_point():
        return torch.randn(like.shape, generator=torch.Generator().manual_seed(0))
    return _random_ids(model.config.get_text_config(encoder=True).vocab_size, like.numel()).view(like.shape)


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


def _own_answer(
    model: PreTrainedModel, cache_name: str, given: Mapping[str, torch.Tensor], ids: torch.Tensor
) -> torch.Tensor:
    """Logits ``[n, V]`` with transformers' cache, which the first call makes."""
    encoded = {"encoder_outputs": model.get_encoder()(**given)}
    steps, own = [], None
    for token in ids:
        output = model(decoder_input_ids=token.view(1, 1), use_cache=True, **encoded, **{cache_name: own})
        steps.append(output.logits[0, -1])
        own = output[cache_name]
    return torch.stack(steps)


def _device_answer(
    model: PreTrainedModel,
    cache_name: str,
    given: Mapping[str, torch.Tensor],
    cache: DeviceEncoderDecoderCache,
    ids: torch.Tensor,
) -> torch.Tensor:
    """Logits ``[n, V]`` with a device's cache; the encoder's keys are computed with the first token only."""
    encoded = {"encoder_outputs": model.get_encoder()(**given)}
    steps = []
    for position, token in enumerate(ids):
        cache.self_attention_cache.position = torch.tensor([position])
        now = {cache_name: cache.when(encoded=position > 0)}
        steps.append(model(decoder_input_ids=token.view(1, 1), use_cache=True, **encoded, **now).logits[0, -1])
    return torch.stack(steps)
