"""The device's own layers, eagerly: a ring keeps exactly its window, and a state begins at zero."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.cache_utils import DummyLayer, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from pipeline.caches import AttentionShape, DeviceCache, LayerShape, StateShape, device_cache
from pipeline.caches.device_layers import NEVER, Ring
from pipeline.caches.measure import layer_shapes

WIDTH = 4


def ring_cache(attention: str, window: int) -> DeviceCache:
    shape = LayerShape(AttentionShape(heads=2, key_width=WIDTH, value_width=WIDTH, window=window))
    return device_cache(attention, [shape], max_length=64, dtype=torch.float32)


def as_stored(keys: torch.Tensor, attention: str) -> torch.Tensor:
    """``[1, K, N, D]`` from what a layer returns."""
    return keys.permute(2, 0, 1, 3) if attention == "custom" else keys


@given(position=st.integers(0, 60), window=st.integers(1, 9), data=st.data())
def test_a_ring_knows_the_position_of_every_entry(position: int, window: int, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, window))
    ring = Ring(torch.tensor([position]), window, tokens)
    held = {slot: [p for p in range(position) if p % window == slot][-1:] for slot in range(window)}
    wanted = [held[slot][0] if held[slot] else NEVER for slot in range(window)]
    assert ring.positions.tolist() == [*wanted, *range(position, position + tokens)]
    assert ring.slots.tolist() == [p % window for p in range(position, position + tokens)]


@pytest.mark.parametrize("attention", ["custom", "portable"])
@given(data=st.data())
def test_a_ring_returns_the_last_window_then_the_new_tokens(attention: str, data: st.DataObject) -> None:
    window = data.draw(st.integers(1, 6))
    lengths = data.draw(st.lists(st.integers(1, window), min_size=1, max_size=6))
    cache, position = ring_cache(attention, window), 0
    for tokens in lengths:
        cache.position = torch.tensor([position])
        number, offset = cache.get_mask_sizes(tokens, 0)
        positions = (offset + torch.arange(number)).tolist()
        new = torch.arange(position, position + tokens).float().reshape(1, 1, -1, 1).expand(1, 2, -1, WIDTH)
        keys, values = cache.update(new, -new, 0)
        assert torch.equal(keys, -values)
        found = as_stored(keys, attention)[0, 0, :, 0].tolist()
        assert len(found) == window + tokens
        seen = {p: f for p, f in zip(positions, found, strict=True) if p != NEVER}
        assert seen == {p: float(p) for p in range(max(0, position - window), position + tokens)}
        position += tokens
    assert cache.layers[0].keys.numel() == 2 * window * WIDTH


def test_a_window_beyond_the_cache_is_as_long_as_the_cache() -> None:
    shape = LayerShape(AttentionShape(2, WIDTH, WIDTH, window=100))
    cache = device_cache("portable", [shape], max_length=8, dtype=torch.float32)
    assert cache.layers[0].max_cache_len == 8


def states() -> LayerShape:
    shapes = (
        StateShape("conv_states", 0, (1, 3, 4), torch.float32),
        StateShape("recurrent_states", 0, (1, 2, 2, 2), torch.float32),
    )
    return LayerShape(None, shapes, 1)


def test_a_state_is_zero_at_the_start_whatever_the_memory_holds_and_then_stays() -> None:
    cache = device_cache("portable", [states()], max_length=8, dtype=torch.float32)
    for table in (cache.layers[0].conv_states, cache.layers[0].recurrent_states):
        table[0].fill_(float("nan"))
    cache.position = torch.tensor([0])
    assert not cache.get_conv_state(0).any()
    whole = cache.update_conv_state(torch.ones(1, 3, 2), 0)
    assert whole[0, 0].tolist() == [0, 0, 0, 0, 1, 1]
    cache.update_recurrent_state(torch.full((1, 2, 2, 2), 5.0), 0)
    assert (cache.get_recurrent_state(0) == 5).all(), "a state is made zero once a call, not at each look"
    cache.position = torch.tensor([2])
    assert cache.get_conv_state(0)[0, 0].tolist() == [0, 0, 1, 1]
    assert (cache.get_recurrent_state(0) == 5).all()
    cache.position = torch.tensor([0])
    assert not cache.get_recurrent_state(0).any()


def test_the_sizes_are_those_of_the_cache_that_the_model_filled() -> None:
    cache = DynamicCache()
    cache.layers = [DynamicLayer(), DynamicSlidingWindowLayer(sliding_window=5), DummyLayer()]
    for layer in cache.layers[:2]:
        layer.update(torch.zeros(1, 2, 1, 6), torch.zeros(1, 2, 1, 4))
    full, window, nothing = layer_shapes(cache)
    assert full == LayerShape(AttentionShape(2, 6, 4, window=None))
    assert window == LayerShape(AttentionShape(2, 6, 4, window=5))
    assert nothing == LayerShape()
