"""Stage: give the model a cache that the program will own, and make sure that its class is a pytree."""

from __future__ import annotations

import inspect

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from pipeline.artifacts import Quantized, Registered
from pipeline.caches import DeviceCache, LayerShape, device_cache, entry_of
from pipeline.config import CacheSettings
from runners.errors import UserError
from runners.manifest import Cache, CacheTensor

_DTYPE_NAMES = {torch.float32: "float32", torch.int64: "int64"}


def register(quantized: Quantized, settings: CacheSettings, attention: str) -> Registered:
    """Return the model with an empty cache of ``settings.max_length`` tokens.

    Raises:
        UserError: the length exceeds the model's limit, or a layer's kind has no device cache.
    """
    config = quantized.model.config.get_text_config(decoder=True)
    _check_length(config, settings.max_length)
    _check_layers(config)
    shapes = _layer_shapes(quantized.model)
    if attention == "custom" and (uneven := [x for x in shapes if x.key_width != x.value_width]):
        raise UserError(
            f"export.attention: custom needs keys and values of one width; this model has {uneven[0].key_width} and "
            f"{uneven[0].value_width}. Set it to portable."
        )
    cache = device_cache(attention, shapes, settings.max_length, dtype=torch.float32)
    entry = entry_of(DeviceCache)
    tensors = [
        CacheTensor(
            path=f"cache.{path}",
            kind="full",
            shape=list(leaf.shape),
            dtype=_DTYPE_NAMES[leaf.dtype],
            bytes=leaf.numel() * leaf.element_size(),
        )
        for path, leaf in entry.named_leaves(cache)
        if path != "position"  # the caller gives it with each call: it is an input, not part of the cache's memory
    ]
    layout = Cache(
        placement=settings.placement,
        attention=attention,
        max_length=settings.max_length,
        bytes=sum(t.bytes for t in tensors),
        tensors=tensors,
    )
    return Registered(quantized.model, cache, entry, layout)


def _layer_shapes(model: PreTrainedModel) -> list[LayerShape]:
    """Sizes of each layer's cache, as the model itself fills one: configurations name them in many ways."""
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=True, **{cache_argument(model): cache})
    return [LayerShape(x.keys.shape[1], x.keys.shape[3], x.values.shape[3]) for x in cache.layers]


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name of the forward's argument that is its cache.

    Raises:
        UserError: it has none.
    """
    parameters = inspect.signature(model.forward).parameters
    name = next((name for name in ("cache", "past_key_values") if name in parameters), None)
    if name is None:
        raise UserError(
            f"model: the forward of {type(model).__name__} takes no cache, so it cannot decode step by step."
        )
    return name


def _check_length(config: PreTrainedConfig, length: int) -> None:
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise UserError(
            f"cache.max_length: {length} tokens exceed the {limit} positions that the model was made for "
            f"(max_position_embeddings); set it to {limit} or less."
        )


def _check_layers(config: PreTrainedConfig) -> None:
    kinds, _ = get_layer_types_and_kwargs(config)
    if other := sorted(set(kinds) - {"full_attention"}):
        raise UserError(
            f"model: {config.model_type} has {', '.join(other)} layers, and only full_attention layers have a device "
            "cache."
        )
