"""Mixtures of experts: the way of computing them that a graph can hold.

Legend: N tokens, E experts, C width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from pipeline.substitution import replaced

# The weights of each token's experts are gathered and multiplied in one batch: no shape depends on which they are.
# transformers' default sorts the tokens by expert and calls an operator of its own, which no device has.
_IMPLEMENTATION = "batched_mm"


@contextmanager
def exportable_experts(model: PreTrainedModel) -> Iterator[None]:
    """Let the model's experts, if it has any, be computed in a batch inside the scope; afterwards as before."""
    with replaced(Llama4TextMoe, "forward", _all_experts), _computed(model, _IMPLEMENTATION):
        yield


@contextmanager
def experts_one_by_one(model: PreTrainedModel) -> Iterator[None]:
    """Let the experts be computed in a loop inside the scope: in float64 too, which the default's operator refuses."""
    with _computed(model, "eager"):
        yield


@contextmanager
def _computed(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    before = model.config._experts_implementation
    if not model._can_set_experts_implementation():
        yield
        return
    model.set_experts_implementation(implementation)
    try:
        yield
    finally:
        model.set_experts_implementation(before)


def _all_experts(moe: Llama4TextMoe, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Llama 4's layer, every expert on every token as in transformers, with a batch axis of experts ``[E, N, C]``.

    transformers folds that axis into the tokens and unfolds it, by sizes that torch.export cannot prove for all N.
    """
    tokens = hidden_states.reshape(-1, moe.hidden_dim)
    scores, logits = moe.router(tokens)  # scores [N, E]: zero for an expert that was not chosen
    routed = tokens.unsqueeze(0) * scores.transpose(0, 1).unsqueeze(-1)
    gate, up = torch.bmm(routed, moe.experts.gate_up_proj).chunk(2, dim=-1)
    each = torch.bmm(moe.experts.act_fn(gate) * up, moe.experts.down_proj)
    return moe.shared_expert(tokens) + each.sum(dim=0), logits
