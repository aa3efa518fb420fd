"""The layers of the device's own cache: fixed storage written in place, whose place in the sequence a call tells them.

Legend: B batch, K key/value heads, S tokens of a call, L cache length, W window, D head width.

``custom`` layers store ``[K, L, 1, D]``, of one sequence, and ``portable`` ones ``[B, K, L, D]``: a head's keys lie
one after the other. ``update`` returns what the queries may see as it lies: ``attention.py`` has the only readers, and
a transpose here would become two real permutes of the whole cache a step. A layer with a window keeps the last W tokens
in a ring and returns them, then the new ones; a call therefore has W tokens at most.
"""

from __future__ import annotations

import torch
from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401  # registers llama::update_cache, llama::custom_sdpa
from transformers.cache_utils import LinearAttentionLayer, StaticLayer

KeysValues = tuple[torch.Tensor, torch.Tensor]
NEVER = 1 << 30  # the position of a ring's slot that was not written yet: later than any query


class Ring:
    """Where the tokens of one call go in a ring of W slots, and which position every entry that is seen has."""

    def __init__(self, position: torch.Tensor, window: int, tokens: int | torch.SymInt) -> None:
        new = torch.arange(tokens) + position
        slot = torch.arange(window)
        # A slot holds the last earlier position equal to it modulo W; W is added so that no operand is negative.
        held = position - 1 - (position - 1 - slot + window) % window
        self.slots = new % window  # int64 [S]
        self.positions = torch.cat((torch.where(held < 0, NEVER, held), new))  # int64 [W + S]


class Call:
    """What the layers of one call share.

    Args:
        position: tokens in the cache before the call, int64 ``[1]``; of a batch each token's position, ``[B, S]``.
        max_length: L.
    """

    def __init__(self, position: torch.Tensor, max_length: int) -> None:
        self.position = position
        self._max_length = max_length
        self._start: int | torch.SymInt | None = None
        self._begun: set[int] = set()  # states that were looked at in this call
        self._rings: dict[int, Ring] = {}

    @property
    def start(self) -> int | torch.SymInt:
        """The position as a number: read from the tensor once a call, however many layers use it."""
        if self._start is None:
            self._start = self.position.item()
            torch._check(self._start >= 0)
            torch._check(self._start < self._max_length)
        return self._start

    def ring(self, window: int, tokens: int | torch.SymInt) -> Ring:
        """Return the ring of ``window`` slots: one for all layers that have it."""
        if window not in self._rings:
            self._rings[window] = Ring(self.position, window, tokens)
        return self._rings[window]

    def begin(self, state: torch.Tensor) -> None:
        """Make a state zero, whatever its memory holds, if this call begins a sequence; once a call."""
        if id(state) in self._begun:
            return
        self._begun.add(id(state))
        goes_on = (self.position > 0).reshape(1, *[1] * (state.dim() - 1))
        state.copy_(torch.where(goes_on, state, 0.0))


class CustomLayer(StaticLayer):
    """Storage ``[K, L, 1, D]``, written by ``llama::update_cache``, read by ``llama::custom_sdpa``.

    To these operators each head is a sequence of one head.
    """

    def update(self, keys: torch.Tensor, values: torch.Tensor, call: Call) -> KeysValues:
        """Write keys and values ``[1, K, S, D]`` and return the storage."""
        torch.ops.llama.update_cache(each_a_sequence(keys), self.keys, call.start)
        torch.ops.llama.update_cache(each_a_sequence(values), self.values, call.start)
        return self.keys, self.values


def each_a_sequence(heads: torch.Tensor) -> torch.Tensor:
    """Return ``[1, K, S, D]`` as ``[K, S, 1, D]``."""
    return heads.squeeze(0).unsqueeze(2)


class PortableLayer(StaticLayer):
    """Storage ``[B, K, L, D]``, written by ``index_copy_``: core operators only."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, call: Call) -> KeysValues:
        """Write keys and values ``[B, K, S, D]`` and return the storage."""
        where = torch.arange(keys.shape[2]) + call.position
        self.keys.index_copy_(2, where, keys.clone(memory_format=torch.contiguous_format))
        self.values.index_copy_(2, where, values.clone(memory_format=torch.contiguous_format))
        return self.keys, self.values


class BatchLayer(StaticLayer):
    """Storage ``[B * K * L, D]`` of sequences that stand at positions of their own: core operators only.

    The axes are one, because a runtime writes in place along one axis only.
    """

    rows: int  # B
    heads: int  # K

    def update(self, keys: torch.Tensor, values: torch.Tensor, call: Call) -> KeysValues:
        """Write keys and values ``[B, K, S, D]``, each token of each row at its position; return ``[B, K, L, D]``."""
        first = torch.arange(self.rows * self.heads).reshape(self.rows, self.heads, 1) * self.max_cache_len
        where = (first + call.position.unsqueeze(1)).reshape(-1)  # [B * K * S]
        return self._write(self.keys, keys, where), self._write(self.values, values, where)

    def _write(self, stored: torch.Tensor, new: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        stored.index_copy_(0, where, new.reshape(-1, new.shape[-1]))
        return stored.reshape(self.rows, self.heads, self.max_cache_len, -1)


class RingLayer(StaticLayer):
    """Storage of the last W tokens; ``max_cache_len`` is W."""

    is_sliding = True
    length_axis: int  # of the storage

    def update(self, keys: torch.Tensor, values: torch.Tensor, call: Call) -> KeysValues:
        """Return the W tokens before the call, then its own ``[B, K, S, D]``, and write these over the oldest ones."""
        slots = call.ring(self.max_cache_len, keys.shape[2]).slots
        return self._turn(self.keys, keys, slots), self._turn(self.values, values, slots)

    def _turn(self, stored: torch.Tensor, new: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        new = (each_a_sequence(new) if self.length_axis == 1 else new).clone(memory_format=torch.contiguous_format)
        seen = torch.cat((stored, new), dim=self.length_axis)  # before the write: a call's first tokens see the oldest
        stored.index_copy_(self.length_axis, slots, new)
        return seen


class CustomRingLayer(RingLayer):
    """Storage ``[K, W, 1, D]``."""

    length_axis = 1


class PortableRingLayer(RingLayer):
    """Storage ``[B, K, W, D]``."""

    length_axis = 2


class StateLayer(LinearAttentionLayer):
    """Conv states ``[B, channels, kernel]`` and recurrent states of any shape: linear attention, state spaces.

    A state has no positions: where a sequence begins (position 0) it is made zero, its value before any token, before
    the model reads it. Models write it in place.
    """

    def begin(self, call: Call) -> None:
        """Make the states what this call is to find; to be called before they are used, once a call or more often."""
        for table in (self.conv_states, self.recurrent_states):
            for state in table.values():
                if state is not None:
                    call.begin(state)


class StateAndAttentionLayer(StateLayer):
    """A layer with states, and with the attention layer that its class names beside this one."""

    def __init__(self, max_cache_len: int, number_of_states: int) -> None:
        StaticLayer.__init__(self, max_cache_len)
        LinearAttentionLayer.__init__(self, number_of_states)


class CustomStateLayer(StateAndAttentionLayer, CustomLayer):
    """States and full attention."""


class PortableStateLayer(StateAndAttentionLayer, PortableLayer):
    """States and full attention."""


class CustomStateRingLayer(StateAndAttentionLayer, CustomRingLayer):
    """States and a window."""


class PortableStateRingLayer(StateAndAttentionLayer, PortableRingLayer):
    """States and a window."""
