"""Models that keep states where transformers' caches have no place for them, and how a device cache stands in there.

MiniMax has a cache class with a list of states beside the layers, RecurrentGemma keeps states in attributes of its
modules, and RWKV in a list of tensors. While such a model is traced, hooks hand it the device cache's states and take
them back. Legend: B batch, H width, N layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.models.minimax.modeling_minimax import MiniMaxCache
from transformers.utils import ModelOutput

from pipeline.caches.device import DeviceCache, LayerShape, StateShape
from pipeline.caches.measure import layer_shape, layer_shapes
from pipeline.substitution import replaced

_RWKV_START = 1e30  # of its running maximum, below zero: transformers' own value before the first token


@dataclass(frozen=True)
class StateKeeping:
    """Where a kind of model keeps its states.

    Args:
        new_cache: an empty cache as the model takes it; None: it makes its own.
        shapes: what each layer keeps, once the model has run a token and returned the third argument.
        scope: in it, the model takes a device cache by the keyword given.
        has_own_states: whether some states are not in its cache, but where only ``scope`` finds them.
    """

    new_cache: Callable[[PreTrainedModel], Cache | None]
    shapes: Callable[[PreTrainedModel, Cache, ModelOutput], list[LayerShape]]
    scope: Callable[[PreTrainedModel, str], AbstractContextManager[None]]
    has_own_states: bool = True


def state_keeping(model: PreTrainedModel) -> StateKeeping:
    """Return the model's row; most models keep all in transformers' caches."""
    return _ROWS.get(model.config.model_type, _IN_THE_CACHE)


# MiniMax. Its check of the cache's class is of calls that ask for a new one back.


def _minimax_shapes(model: PreTrainedModel, cache: Cache, output: ModelOutput) -> list[LayerShape]:
    states = dict(enumerate(cache.linear_cache))
    return [
        _recurrent(states[index]) if isinstance(states.get(index), torch.Tensor) else layer_shape(layer, index)
        for index, layer in zip(range(len(cache)), [*cache.layers, *[None] * len(cache)], strict=False)
    ]


def _minimax_scope(model: PreTrainedModel, cache_name: str) -> AbstractContextManager[None]:
    return replaced(model.config, "use_cache", False)


# RecurrentGemma


def _blocks(model: PreTrainedModel) -> dict[int, nn.Module]:
    """The blocks that keep states, by the number of their layer."""
    blocks = {index: layer.temporal_block for index, layer in enumerate(model.model.layers)}
    return {index: block for index, block in blocks.items() if hasattr(block, "conv1d_state")}


def _recurrent_gemma_shapes(model: PreTrainedModel, cache: Cache, output: ModelOutput) -> list[LayerShape]:
    shapes = layer_shapes(cache)
    for index, block in _blocks(model).items():
        conv = StateShape("conv_states", 0, tuple(block.conv1d_state.shape), block.conv1d_state.dtype)
        shapes[index] = LayerShape(None, (conv, *_recurrent(block.rg_lru.recurrent_states).states), 1)
    return shapes


@contextmanager
def _recurrent_gemma_scope(model: PreTrainedModel, cache_name: str) -> Iterator[None]:
    blocks = _blocks(model)

    def give(_: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        cache = _device_cache(kwargs, cache_name)
        for index, block in blocks.items():
            block.conv1d_state = cache.get_conv_state(index)
            block.rg_lru.recurrent_states = cache.get_recurrent_state(index)

    def take(_: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], output: object) -> None:
        cache = _device_cache(kwargs, cache_name)
        for index, block in blocks.items():
            cache.get_conv_state(index).copy_(block.conv1d_state)
            cache.get_recurrent_state(index).copy_(block.rg_lru.recurrent_states)

    try:
        with _hooked(model, give, take):
            yield
    finally:
        for block in blocks.values():
            block.conv1d_state = block.rg_lru.recurrent_states = None


# RWKV: five states [B, H, N] of all layers, the last of which starts far below zero


def _rwkv_shapes(model: PreTrainedModel, cache: Cache, output: ModelOutput) -> list[LayerShape]:
    states = output["state"]
    places = [StateShape("recurrent_states", i, tuple(s.shape), s.dtype) for i, s in enumerate(states)]
    return [LayerShape(None, tuple(places), len(places))]


@contextmanager
def _rwkv_scope(model: PreTrainedModel, cache_name: str) -> Iterator[None]:
    given: dict[DeviceCache, list[torch.Tensor]] = {}

    def give(
        _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        cache = _device_cache(kwargs, cache_name)
        states = [cache.get_recurrent_state(0, place).clone() for place in range(cache.layers[0].number_of_states)]
        states[-1] = torch.where(cache.position > 0, states[-1], -_RWKV_START)
        given[cache] = states  # the model writes them in place
        return args, {**kwargs, cache_name: states}

    def take(_: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], output: object) -> None:
        cache, states = given.popitem()
        for place, state in enumerate(states):
            cache.get_recurrent_state(0, place).copy_(state)

    with _hooked(model, give, take):
        yield


@contextmanager
def _hooked(model: PreTrainedModel, before: Callable[..., object], after: Callable[..., object]) -> Iterator[None]:
    hooks = (
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, with_kwargs=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _device_cache(kwargs: Mapping[str, object], name: str) -> DeviceCache:
    cache = kwargs[name]
    assert isinstance(cache, DeviceCache), "models are traced with the device's own cache"
    return cache


def _recurrent(state: torch.Tensor) -> LayerShape:
    return LayerShape(None, (StateShape("recurrent_states", 0, tuple(state.shape), state.dtype),), 1)


def _dynamic_cache(model: PreTrainedModel) -> Cache:
    return DynamicCache(config=model.config)


_IN_THE_CACHE = StateKeeping(
    _dynamic_cache,
    lambda model, cache, output: layer_shapes(cache),
    lambda model, cache_name: nullcontext(),
    has_own_states=False,
)
_ROWS = {
    "minimax": StateKeeping(lambda model: MiniMaxCache(), _minimax_shapes, _minimax_scope),
    "recurrent_gemma": StateKeeping(_dynamic_cache, _recurrent_gemma_shapes, _recurrent_gemma_scope),
    "rwkv": StateKeeping(lambda model: None, _rwkv_shapes, _rwkv_scope),
}
