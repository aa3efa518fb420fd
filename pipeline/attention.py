"""Attention over the device's cache, registered under transformers' own interfaces. Model code is not edited.

Legend: B batch, H query heads, K key/value heads, G = H / K, S tokens of a call, L cache length, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.export import ExportedProgram
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from runners.errors import UserError

_UNSUPPORTED = {"softcap": "soft-capped scores", "s_aux": "attention sinks", "head_mask": "a head mask"}


def custom(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: int | torch.SymInt,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention by ``llama::custom_sdpa``.

    Args:
        module: the model's attention layer (not used).
        query: ``[B, H, S, D]``.
        key: the cache's storage, ``[B, L, K, D]``.
        value: the cache's storage, ``[B, L, K, D]``.
        attention_mask: the position of the first query token, which ``_position_mask`` passes on.
        scaling: of the scores; None means ``D ** -0.5``.
        kwargs: what else the model passes; a mechanism that the operator lacks is refused.

    Returns:
        ``[B, S, H, D]``, and None in place of the attention weights.
    """
    _refuse_unsupported(kwargs)
    out = torch.ops.llama.custom_sdpa(query.transpose(1, 2), key, value, attention_mask, None, 0.0, True, scaling)
    return out, None


def portable(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention over the whole storage by core operators.

    Args:
        module: the model's attention layer (not used).
        query: ``[B, H, S, D]``.
        key: the cache's storage, ``[B, K, L, D]``.
        value: the cache's storage, ``[B, K, L, D]``.
        attention_mask: ``[B, 1, S, L]``, added to the scores.
        scaling: of the scores; None means ``D ** -0.5``.
        kwargs: what else the model passes; a mechanism that is not written here is refused.

    Returns:
        ``[B, S, H, D]``, and None in place of the attention weights.
    """
    _refuse_unsupported(kwargs)
    b, h, s, d = query.shape
    k = key.shape[1]
    grouped = query.reshape(b, k, h // k, s, d)
    scores = torch.matmul(grouped, key.unsqueeze(2).transpose(3, 4)) * (scaling if scaling is not None else d**-0.5)
    weights = torch.softmax(scores + attention_mask.unsqueeze(1), dim=-1)
    out = torch.matmul(weights, value.unsqueeze(2)).reshape(b, h, s, value.shape[-1])
    return out.transpose(1, 2), None


def _position_mask(*, q_offset: int | torch.SymInt, **kwargs: object) -> int | torch.SymInt:
    """Hand the position to ``custom`` in the place of a mask: the operator masks by itself."""
    return q_offset


def _refuse_unsupported(kwargs: dict[str, object]) -> None:
    for name, what in _UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise UserError(
                f"export.attention: this model's attention needs {what} ({name}), which it does not implement yet."
            )


_FUNCTIONS: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {
    "custom": (custom, _position_mask),
    "portable": (portable, eager_mask),
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


def require_custom(program: ExportedProgram, model: PreTrainedModel, layers: int) -> None:
    """Make sure that ``custom`` is what attends: only it reads the cache as ``CustomLayer`` stores it.

    Raises:
        UserError: fewer of its operators than ``layers`` are in the traced program.
    """
    graph = program.graph_module.graph
    found = graph.find_nodes(op="call_function", target=torch.ops.llama.custom_sdpa.default)
    if len(found) < layers:
        raise UserError(
            f"export.attention: {type(model).__name__} attends by code of its own, not through transformers' attention "
            "interface, so custom cannot take its place; set it to portable."
        )
