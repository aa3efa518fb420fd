"""Sliding-window layers for a trace: the same contents as transformers' own, without a branch on how many tokens came.

Legend: B batch, K key/value heads, S tokens of a call, W window, N tokens stored, D head width.

transformers' layers count in a Python number and ask ``if it is full``, so that a traced step is right on one side of
the window only. Inside a trace a rebuilt layer is one of these: it counts in an int64 ``[]`` tensor, and every index is
computed from it. Outside of a trace a rebuilt layer is transformers' own class again, with its Python number.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import (
    DynamicSlidingWindowLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionAndStaticSlidingWindowAttentionLayer,
    StaticSlidingWindowLayer,
)

KeysValues = tuple[torch.Tensor, torch.Tensor]


class TracedStaticWindow:
    """Storage ``[B, K, W, D]``: the first tokens from the left, and once it is full the last W, oldest first."""

    keys: torch.Tensor
    values: torch.Tensor
    cumulative_length: torch.Tensor
    max_cache_len: int  # W

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object) -> KeysValues:
        """Store keys and values ``[B, K, S, D]`` and return what the queries may see, ``[B, K, W + S, D]``."""
        tokens = key_states.shape[-2]
        stored = self.cumulative_length.clamp(max=self.max_cache_len)
        new = torch.arange(tokens, device=key_states.device) + stored
        shift = (stored + tokens - self.max_cache_len).clamp(min=0)
        kept = torch.arange(self.max_cache_len, device=key_states.device) + shift
        keys = torch.cat((self.keys, torch.zeros_like(key_states)), dim=-2).index_copy(2, new, key_states)
        values = torch.cat((self.values, torch.zeros_like(value_states)), dim=-2).index_copy(2, new, value_states)
        self.keys.copy_(keys.index_select(2, kept))
        self.values.copy_(values.index_select(2, kept))
        self.cumulative_length.add_(tokens)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, torch.Tensor]:
        """Return the length that ``update`` returns, and the position of its first entry, int64 ``[]``.

        Entries behind the last token have later positions than any query, so a causal mask hides them.
        """
        return self.max_cache_len + query_length, (self.cumulative_length - self.max_cache_len).clamp(min=0)

    def get_seq_length(self) -> torch.Tensor:
        """Return the number of tokens so far, int64 ``[]``: a copy, because ``update`` writes in place."""
        return self.cumulative_length.clone()


class TracedDynamicWindow:
    """Storage ``[B, K, N, D]`` of the last ``N = min(tokens so far, W - 1)`` tokens."""

    keys: torch.Tensor
    values: torch.Tensor
    cumulative_length: torch.Tensor
    sliding_window: int  # W

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object) -> KeysValues:
        """Append keys and values ``[B, K, S, D]`` and return what the queries may see, ``[B, K, N + S, D]``."""
        keys = torch.cat((self.keys, key_states), dim=-2)
        values = torch.cat((self.values, value_states), dim=-2)
        length = keys.shape[-2]
        kept = torch.sym_min(length, self.sliding_window - 1)
        where = torch.arange(kept, device=keys.device) + (length - kept)
        self.keys, self.values = keys.index_select(2, where), values.index_select(2, where)
        self.cumulative_length = self.cumulative_length + key_states.shape[-2]
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, torch.Tensor]:
        """Return the length that ``update`` returns, and the position of its first entry, int64 ``[]``."""
        stored = self.keys.shape[-2]
        return stored + query_length, self.cumulative_length - stored

    def get_seq_length(self) -> torch.Tensor:
        """Return the number of tokens so far, int64 ``[]``."""
        return self.cumulative_length


class TracedStaticSlidingWindowLayer(TracedStaticWindow, StaticSlidingWindowLayer):
    """Stands for ``StaticSlidingWindowLayer`` in a trace."""


class TracedDynamicSlidingWindowLayer(TracedDynamicWindow, DynamicSlidingWindowLayer):
    """Stands for ``DynamicSlidingWindowLayer`` in a trace."""


class TracedLinearAndStaticWindowLayer(TracedStaticWindow, LinearAttentionAndStaticSlidingWindowAttentionLayer):
    """Stands for ``LinearAttentionAndStaticSlidingWindowAttentionLayer`` in a trace."""


class TracedLinearAndDynamicWindowLayer(TracedDynamicWindow, LinearAttentionAndSlidingWindowAttentionLayer):
    """Stands for ``LinearAttentionAndSlidingWindowAttentionLayer`` in a trace."""
