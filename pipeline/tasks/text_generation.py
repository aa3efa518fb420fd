"""Decoder language models: ``forward`` (any number of tokens) and ``decode`` (one), sharing weights and cache.

S tokens of a call, L cache length, V vocabulary. Contract: ``(tokens int64 [1, S], position int64 [1]) -> logits
float32 [1, S or 1, V]``; it is that of ExecuTorch's own LLM runner, whose tables are in docs/contract.md.
"""

from __future__ import annotations

import inspect

import torch
from torch.export import Dim

from pipeline.artifacts import Registered
from pipeline.config import ExportSettings
from pipeline.register import cache_argument
from pipeline.tasks.plan import MethodPlan
from runners.errors import UserError
from runners.manifest import Cache, Tokenizer

_EXAMPLE_TOKENS = 8  # of the dynamic axis; any length but 0 and 1, which torch would take for fixed


def plan(registered: Registered, settings: ExportSettings) -> list[MethodPlan]:
    """Return how each method of ``settings.methods`` is traced.

    Raises:
        UserError: the model's forward takes no cache, or cannot leave out logits.
    """
    parameters = inspect.signature(registered.model.forward).parameters
    cache_name = cache_argument(registered.model)
    if settings.logits == "last" and "logits_to_keep" not in parameters:
        raise UserError(
            f"export.logits: {type(registered.model).__name__} cannot leave out logits (no logits_to_keep); set it to "
            "all."
        )
    longest = settings.max_prefill_length or registered.layout.max_length
    lengths = {"forward": (min(_EXAMPLE_TOKENS, longest), longest), "decode": (1, 1)}
    return [_method(name, *lengths[name], registered, settings, cache_name) for name in settings.methods]


def _method(
    name: str, example: int, longest: int, registered: Registered, settings: ExportSettings, cache_name: str
) -> MethodPlan:
    keep = {"logits_to_keep": 1} if settings.logits == "last" else {}
    dynamic = {1: Dim("tokens", min=1, max=longest)} if longest > 1 else None
    leaves = [None] * len(registered.entry.named_leaves(registered.cache))
    return MethodPlan(
        name=name,
        kwargs={"input_ids": torch.zeros(1, example, dtype=torch.int64), cache_name: registered.cache, **keep},
        dynamic_shapes={"input_ids": dynamic, cache_name: leaves, **dict.fromkeys(keep)},
        cache=cache_name,
        input_names={"input_ids": "tokens", f"{cache_name}_position": "position"},
        outputs=("logits",),
    )


def constant_methods(
    layout: Cache, tokenizer: Tokenizer, vocabulary_size: int, settings: ExportSettings
) -> dict[str, int | bool | list[int]]:
    """Return the constants that the stock runner reads.

    ``get_max_seq_len`` is also its prefill chunk; where it is smaller than the context, the stock runner takes the
    model for one with a sliding window.
    """
    return {
        "get_max_seq_len": settings.max_prefill_length or layout.max_length,
        "get_max_context_len": layout.max_length,
        "get_bos_id": tokenizer.bos_id if tokenizer.bos_id is not None else -1,
        "get_eos_ids": list(tokenizer.eos_ids),
        "get_vocab_size": vocabulary_size,
        "enable_dynamic_shape": True,
        "use_kv_cache": True,
        "use_sdpa_with_kv_cache": layout.attention == "custom",
    }
