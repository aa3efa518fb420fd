"""Stage: give the model a cache that the program will own, and make sure that its class is a pytree."""

from __future__ import annotations

import inspect

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache as ModelCache

from pipeline.agreement import require_agreement
from pipeline.artifacts import Quantized, Registered
from pipeline.attention import Attention, choose_attention, observed_attention
from pipeline.caches import (
    CachePytree,
    DeviceCache,
    DeviceEncoderDecoderCache,
    LayerShape,
    device_cache,
    entry_of,
)
from pipeline.caches.cross import part_of
from pipeline.caches.own_states import state_keeping
from pipeline.config import CacheSettings, ExportSettings
from pipeline.counting import watched_counting
from runners.errors import UserError
from runners.manifest import Cache, CacheKind, CacheTensor


def register(quantized: Quantized, settings: CacheSettings, export: ExportSettings) -> Registered:
    """Return the model with an empty cache of ``settings.max_length`` tokens.

    Raises:
        UserError: the length exceeds the model's limit, a layer's kind has no device cache, or the attention that
            ``export`` asks for does not fit the model, or the model says something else with such a cache.
    """
    _check_length(quantized.model.config.get_text_config(decoder=True), settings.max_length)
    shapes, attention = measured(quantized.model, settings, export)
    _check_batch(quantized.model, shapes, settings.batch_size)
    keeping = state_keeping(quantized.model)
    with watched_counting() as counting:
        if not keeping.has_own_states:
            trial = device_cache(attention, shapes, settings.max_length, torch.float32)
            require_agreement(quantized.model, cache_argument(quantized.model), keeping, trial, attention)
    cache = device_cache(attention, shapes, settings.max_length, torch.float32, settings.batch_size)
    cache.counts_by_number = counting.needs_number and settings.batch_size == 1  # rows are told their positions
    entry = entry_of(DeviceCache)
    tensors = cache_tensors(entry, cache)
    layout = Cache(
        placement=settings.placement,
        attention=attention,
        max_length=settings.max_length,
        bytes=sum(t.bytes for t in tensors),
        tensors=tensors,
    )
    return Registered(quantized.model, attention, cache, entry, layout)


def measured(
    model: PreTrainedModel, settings: CacheSettings, export: ExportSettings
) -> tuple[list[LayerShape], Attention]:
    """Run one token, and return the sizes of each layer's cache and the attention that fits the model.

    Raises:
        UserError: a layer's kind has no device cache, its window is of one token or not in the model's mask, or the
            attention that ``export`` asks for does not fit.
    """
    keeping = state_keeping(model)
    cache = keeping.new_cache(model)
    arguments = {"input_ids": torch.zeros(1, 1, dtype=torch.int64), "use_cache": True, cache_argument(model): cache}
    with torch.inference_mode(), observed_attention(model) as seen:
        output = model(**arguments)
    shapes = keeping.shapes(model, cache, output)
    layers = [shape.attention for shape in shapes if shape.attention is not None]
    window = next((layer.window for layer in layers if layer.window is not None), None)
    if window is not None and seen.calls and not seen.windows:
        raise UserError(
            f"model: {type(model).__name__} keeps the last {window} tokens in its cache, but its mask has no window: "
            "what it says depends on how its tokens are fed. It cannot be built."
        )
    if any(layer.window == 1 for layer in layers):
        raise UserError(
            f"model: {type(model).__name__} has a window or chunks of 1 token, with which transformers' own cache "
            "keeps all tokens, and its mask none of them; expected 2 or more (sliding_window or attention_chunk_size "
            "in the model's config.json). It cannot be built."
        )
    attention = choose_attention(
        export.attention, seen, layers, _keys_and_values(cache), settings.placement, settings.batch_size
    )
    return shapes, attention


def _keys_and_values(cache: ModelCache | None) -> list[torch.Tensor]:
    found = [getattr(layer, name, None) for layer in getattr(cache, "layers", ()) for name in ("keys", "values")]
    return [each for each in found if isinstance(each, torch.Tensor)]


def _check_batch(model: PreTrainedModel, shapes: list[LayerShape], batch_size: int) -> None:
    """Rows of a batch are padded, and a padding token may leave no trace.

    Raises:
        UserError: the model has layers that keep one, or it computes the positions of its tokens itself.
    """
    if batch_size == 1:
        return
    name = type(model).__name__
    if any(shape.states or (shape.attention is not None and shape.attention.window is not None) for shape in shapes):
        raise UserError(
            f"cache.batch_size: {batch_size}, but {name} has layers with a window or a state, which would keep the "
            "tokens that pad a shorter row; set it to 1."
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UserError(
            f"cache.batch_size: {batch_size}, but {name} takes no position_ids, so its rows cannot stand at positions "
            "of their own; set it to 1."
        )


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name of the forward's argument that is its cache.

    Raises:
        UserError: it has none.
    """
    parameters = inspect.signature(model.forward).parameters
    name = next((name for name in ("cache", "past_key_values", "state") if name in parameters), None)
    if name is None:
        raise UserError(
            f"model: the forward of {type(model).__name__} takes no cache, so it cannot decode step by step."
        )
    return name


def cache_tensors(entry: CachePytree, cache: DeviceCache | DeviceEncoderDecoderCache) -> list[CacheTensor]:
    """Return the cache's tensors as the manifest lists them; the position, which is an input, is not one of them."""
    return [
        CacheTensor(
            path=f"cache.{path}",
            kind=_kind(path, cache),
            shape=list(leaf.shape),
            dtype=str(leaf.dtype).removeprefix("torch."),
            bytes=leaf.numel() * leaf.element_size(),
        )
        for path, leaf in entry.named_leaves(cache)
        if not is_position(path)
    ]


def is_position(path: str) -> bool:
    """Whether a leaf is the position: the caller gives it with each call, so it is no part of the cache's memory."""
    return path.rpartition(".")[2] == "position"


def _kind(path: str, cache: DeviceCache | DeviceEncoderDecoderCache) -> CacheKind:
    if isinstance(cache, DeviceEncoderDecoderCache):
        part, _, rest = path.partition(".")
        return "cross" if part_of(path) == "cross" else _kind(rest, getattr(cache, part))
    _, index, name = path.split(".", 2)
    if name.startswith("conv_states"):
        return "conv"
    if name.startswith("recurrent_states"):
        return "recurrent"
    return "sliding" if cache.layers[int(index)].is_sliding else "full"


def _check_length(config: PreTrainedConfig, length: int) -> None:
    """Hold the cache's length against the positions that the model was made for.

    Raises:
        UserError: it exceeds them.
    """
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise UserError(
            f"cache.max_length: {length} tokens exceed the {limit} positions that the model was made for "
            f"(max_position_embeddings); set it to {limit} or less."
        )
