"""Linear-attention and state-space layers: conv states ``[B, channels, kernel]`` and recurrent states of any shape.

A state of zeros is the state before the first token, so ``has_previous_state``, a Python flag that the first step
sets, is true in every registered cache: a cache starts from zeros (``rewind``), never from nothing.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, LinearAttentionLayer

from pipeline.caches.layer import Layer, LayerPytree


def _settle(layer: Layer) -> None:
    if not all(layer.has_previous_state.values()):
        raise ValueError(
            "has no previous state yet, and a program that starts without one differs from one that goes on. "
            "Run the model once and call pipeline.caches.rewind(cache), which leaves a state of zeros."
        )


def _derive(layer: Layer) -> None:
    conv, places = layer.conv_states, range(layer.number_of_states)
    layer.is_conv_states_initialized = {i: conv[i] is not None for i in places}
    layer.is_recurrent_states_initialized = {i: layer.recurrent_states[i] is not None for i in places}
    layer.has_previous_state = dict.fromkeys(places, True)
    layer.conv_kernel_size = {i: None if conv[i] is None else conv[i].shape[-1] for i in places}
    layer.dtype = next((tensor.dtype for tensor in conv.values() if tensor is not None), None)
    if not hasattr(layer, "device"):  # only conv states set it
        layer.device = None


def linear_step(cache: Cache, index: int) -> None:
    """Feed one token to every conv state, and every recurrent state its successor."""
    layer = cache.layers[index]
    for place, state in layer.conv_states.items():
        if state is not None:
            cache.update_conv_state(torch.zeros_like(state[..., :1]), index, state_idx=place)
    for place, state in layer.recurrent_states.items():
        if state is not None:
            cache.update_recurrent_state(torch.zeros_like(state), index, state_idx=place)


LINEAR_LAYER = LayerPytree(
    LinearAttentionLayer,
    leaves=(),
    static=("number_of_states",),
    tables=("conv_states", "recurrent_states"),
    fixed=(("record_past", False),),
    settle=(_settle,),
    derive=(_derive,),
    step=(linear_step,),
)


def fill_linear(layer: Layer) -> None:
    """Give a new layer its states, through its own methods: two tokens of two channels, and a state ``[1, 2, 3]``."""
    for place in range(layer.number_of_states):
        layer.update_conv_state(torch.zeros(1, 2, 2), place, conv_kernel_size=4)
        layer.update_recurrent_state(torch.zeros(1, 2, 3), place)
