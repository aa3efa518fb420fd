"""Attention over the device's cache, registered under transformers' own interfaces. Model code is not edited.

Legend: B batch, H query heads, K key/value heads, G = H / K, S tokens of a call, N entries seen, D head width.
N is the cache's length; of a layer with a window W it is W + S.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import (
    AttentionMaskInterface,
    bidirectional_mask_function,
    causal_mask_function,
    eager_mask,
)

from pipeline.caches.device import AttentionShape
from pipeline.caches.device_layers import each_a_sequence
from runners.errors import UserError

Attention = Literal["custom", "portable"]
Position: TypeAlias = int | torch.SymInt
MaskFunction = Callable[..., torch.Tensor]

# What a model may ask of its attention: keyword -> its name for messages.
_PORTABLE_LACKS = {
    "head_mask": "a head mask",
    "sinks": "attention sinks by token",
    "block_indices": "blocks chosen by an indexer",
}
_CUSTOM_LACKS = {
    "softcap": "soft-capped scores",
    "s_aux": "attention sinks",
    "position_bias": "a bias by position",
    **_PORTABLE_LACKS,
}


def custom(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Position | torch.Tensor,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention by ``llama::custom_sdpa``, to which each key head is a sequence, and its query heads are the heads.

    Args:
        module: the model's attention layer (not used).
        query: ``[1, H, S, D]``.
        key: as the cache's layer returns it, ``[K, N, 1, D]``.
        value: as the cache's layer returns it, ``[K, N, 1, D]``.
        attention_mask: the position of the first query token, which ``_position_or_mask`` passes on: the operator then
            is causal by itself and reads up to the last query only. Of a ring: ``[1, 1, S, N]``, added to the scores.
        scaling: of the scores; None means ``D ** -0.5``.
        kwargs: what else the model passes; a mechanism that the operator lacks is refused.

    Returns:
        ``[1, S, H, D]``, and None in place of the attention weights.
    """
    _refuse(kwargs, _CUSTOM_LACKS, "custom")
    _, h, s, d = query.shape
    k = key.shape[0]
    rows = each_a_sequence(query) if h == k else query.reshape(k, h // k, s, d).transpose(1, 2)  # [K, S, G, D]
    if isinstance(attention_mask, torch.Tensor):
        out = torch.ops.llama.custom_sdpa(rows, key, value, 0, attention_mask[0, 0], 0.0, False, scaling)
    else:
        out = torch.ops.llama.custom_sdpa(rows, key, value, attention_mask, None, 0.0, True, scaling)
    return out.transpose(0, 1).reshape(1, s, h, d), None


def portable(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention over all entries by core operators.

    Args:
        module: the model's attention layer (not used).
        query: ``[B, H, S, D]``.
        key: ``[B, K, N, D]``.
        value: ``[B, K, N, D]``.
        attention_mask: ``[B, 1, S, N]``, added to the scores; None: every query sees every entry.
        scaling: of the scores; None means ``D ** -0.5``.
        softcap: scores become ``softcap * tanh(scores / softcap)``, as in Gemma 2.
        s_aux: a further score a head that takes part in the softmax and has no value, ``[H]``: attention sinks.
        position_bias: ``[1, H, S, N]``, added to the scores, as in T5.
        kwargs: what else the model passes; a mechanism that is not written here is refused.

    Returns:
        ``[B, S, H, D]``, and None in place of the attention weights.
    """
    _refuse(kwargs, _PORTABLE_LACKS, "portable")
    b, h, s, d = query.shape
    k = key.shape[1]
    grouped = h != k
    if grouped:
        query, key, value = query.reshape(b, k, h // k, s, d), key.unsqueeze(2), value.unsqueeze(2)
    scores = torch.matmul(query, key.transpose(-2, -1)) * (scaling if scaling is not None else d**-0.5)
    if position_bias is not None:
        scores = scores + position_bias.reshape(-1, *scores.shape[1:])
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is not None:
        scores = scores + (attention_mask.unsqueeze(1) if grouped else attention_mask)
    if s_aux is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        sinks = s_aux.reshape(*scores.shape[1:-2], 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]
    return torch.matmul(weights, value).reshape(b, h, s, value.shape[-1]).transpose(1, 2), None


def _position_or_mask(
    *,
    q_offset: Position | torch.Tensor,
    kv_offset: int | torch.Tensor,
    mask_function: MaskFunction = causal_mask_function,
    **kwargs: object,
) -> Position | torch.Tensor:
    """The mask of ``custom``: of a ring a tensor, otherwise the position, because the operator masks by itself."""
    if isinstance(kv_offset, torch.Tensor):
        mask: torch.Tensor = eager_mask(q_offset=q_offset, kv_offset=kv_offset, mask_function=mask_function, **kwargs)
        return mask
    if mask_function is not causal_mask_function:
        raise UserError(
            "export.attention: this model masks its full-attention layers in a way of its own, and custom is causal by "
            "itself; set it to portable."
        )
    assert not isinstance(q_offset, torch.Tensor), "a cache with custom layers gives the position as a number"
    return q_offset


def _additive_mask(
    *,
    q_offset: int | torch.Tensor,
    kv_length: int,
    mask_function: MaskFunction = causal_mask_function,
    **kwargs: object,
) -> torch.Tensor | None:
    """The mask of ``portable``; of a batch ``[B, 1, S, N]``, from the position of each token (int64 ``[B, S]``)."""
    if not isinstance(q_offset, torch.Tensor) or q_offset.dim() < 2:
        mask: torch.Tensor | None = eager_mask(
            q_offset=q_offset, kv_length=kv_length, mask_function=mask_function, **kwargs
        )
        return mask
    rows = torch.arange(q_offset.shape[0]).reshape(-1, 1, 1, 1)
    seen = mask_function(rows, torch.zeros(1, 1, 1, 1), q_offset[:, None, :, None], torch.arange(kv_length))
    return torch.where(seen, 0.0, torch.finfo(torch.float32).min)


def _no_mask(*, mask_function: MaskFunction = causal_mask_function, **kwargs: object) -> None:
    """The mask of ``whole``: none. What pads an image's patches is not looked at: a program's images have none.

    Raises:
        UserError: the model lets a position see some others only.
    """
    if mask_function is not bidirectional_mask_function:
        raise UserError("model: its encoder masks positions from each other, and here each sees all others.")


def _refuse(kwargs: dict[str, object], lacks: dict[str, str], name: str) -> None:
    for keyword, what in lacks.items():
        if kwargs.get(keyword) is not None:
            raise UserError(f"export.attention: this model's attention needs {what} ({keyword}), which {name} lacks.")


_FUNCTIONS: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {
    "custom": (custom, _position_or_mask),
    "portable": (portable, _additive_mask),
    "whole": (portable, _no_mask),  # of an encoder that has no cache: each position sees all others
}

for _name, (_attention, _mask) in _FUNCTIONS.items():
    AttentionInterface.register(f"pteline_{_name}", _attention)
    AttentionMaskInterface.register(f"pteline_{_name}", _mask)


@contextmanager
def attention_of(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Let the model attend by the function ``name`` inside the scope; afterwards it attends as before."""
    before = model.config._attn_implementation
    model.set_attn_implementation(f"pteline_{name}")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@dataclass
class Observed:
    """What a model asked of its attention while it ran."""

    calls: int = 0  # through transformers' attention interface
    needs: set[str] = field(default_factory=set)  # what ``custom`` lacks
    windows: bool = False  # whether a mask had a window, or chunks
    read: list[torch.Tensor] = field(default_factory=list)  # keys and values; held, so that no two share an address

    def reads_as_it_lies(self, stored: Sequence[torch.Tensor]) -> bool:
        """Whether every call read keys and values that a cache returned, not what the model made of them."""
        return {_place(x) for x in self.read} <= {_place(x) for x in stored}


def _place(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape


@contextmanager
def observed_attention(model: PreTrainedModel) -> Iterator[Observed]:
    """Let the model attend by ``portable`` inside the scope, over a cache of transformers', and watch it."""
    seen = Observed()

    def attend(*args: torch.Tensor, **kwargs: object) -> object:
        seen.calls += 1
        seen.read += args[2:4]
        seen.needs |= {what for keyword, what in _CUSTOM_LACKS.items() if kwargs.get(keyword) is not None}
        return portable(*args, **kwargs)  # type: ignore[arg-type]

    def mask(*, mask_function: MaskFunction = causal_mask_function, **kwargs: object) -> object:
        if kwargs.get("local_size") is not None:
            seen.windows = True
        elif mask_function is not causal_mask_function:
            seen.needs.add("a mask of its own")
        return eager_mask(mask_function=mask_function, **kwargs)

    AttentionInterface.register("pteline_observed", attend)
    AttentionMaskInterface.register("pteline_observed", mask)
    with attention_of(model, "observed"):
        yield seen


def choose_attention(
    wanted: Literal["auto", "custom", "portable"],
    seen: Observed,
    layers: Sequence[AttentionShape],
    stored: Sequence[torch.Tensor],
    placement: str,
    batch_size: int = 1,
) -> Attention:
    """Return ``wanted``, or for ``auto`` custom where the model and the cache's placement allow it.

    Args:
        wanted: the configuration's.
        seen: what the model asked for.
        layers: sizes of each attention layer.
        stored: keys and values of each attention layer, after the model ran.
        placement: of the cache.
        batch_size: of the cache.

    Raises:
        UserError: ``custom`` is wanted and does not fit.
    """
    if wanted == "portable":
        return "portable"
    why_not = _why_not_custom(seen, layers, stored, placement, batch_size)
    if why_not is None:
        return "custom"
    if wanted == "custom":
        raise UserError(f"export.attention: custom does not fit this model: {why_not}. Set it to auto or portable.")
    return "portable"


def _why_not_custom(
    seen: Observed, layers: Sequence[AttentionShape], stored: Sequence[torch.Tensor], placement: str, batch_size: int
) -> str | None:
    if not layers:
        return "it has no attention layers"
    if placement != "buffer":
        return f"it writes a cache inside the program, and cache.placement is {placement}"
    if batch_size > 1:
        return f"it takes one position for all rows, and cache.batch_size is {batch_size}"
    if seen.calls < len(layers):
        return "it attends by code of its own, not through transformers' attention interface"
    if seen.needs:
        return f"its attention needs {', '.join(sorted(seen.needs))}"
    if not seen.reads_as_it_lies(stored):
        return "it changes keys or values on their way from the cache to its attention, and custom stores other axes"
    if seen.windows and all(layer.window is None for layer in layers):
        return "it masks windows or chunks over a cache that keeps all tokens"
    if uneven := next((layer for layer in layers if layer.key_width != layer.value_width), None):
        return f"its keys are {uneven.key_width} wide and its values {uneven.value_width}"
    return None
