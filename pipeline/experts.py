"""Mixtures of experts: the way of computing them that a graph can hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

# The weights of each token's experts are gathered and multiplied in one batch: no shape depends on which they are.
# transformers' default sorts the tokens by expert and calls an operator of its own, which no device has.
_IMPLEMENTATION = "batched_mm"


@contextmanager
def exportable_experts(model: PreTrainedModel) -> Iterator[None]:
    """Let the model's experts, if it has any, be computed in a batch inside the scope; afterwards as before."""
    before = model.config._experts_implementation
    if not model._can_set_experts_implementation():
        yield
        return
    model.set_experts_implementation(_IMPLEMENTATION)
    try:
        yield
    finally:
        model.set_experts_implementation(before)
