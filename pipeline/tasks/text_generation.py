"""Decoder language models: ``forward`` (any number of tokens), ``decode`` (one) and ``verify`` (a few, with the logits
of each), sharing weights and cache.

S tokens of a call, L cache length, V vocabulary. Contract: ``(tokens int64 [1, S], position int64 [1]) -> logits
float32 [1, S or 1, V]``; it is that of ExecuTorch's own LLM runner, whose tables are in docs/contract.md. A batch of B
sequences has ``tokens`` and ``position`` int64 [B, S]: each token's position in its row. With ``export.top_k: N`` the
N likeliest tokens are returned in the place of the logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path

import torch
from pydantic import JsonValue
from torch.export import Dim
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pipeline.artifacts import Loaded, ProgramFacts, Quantized, Registered
from pipeline.caches import DeviceCache
from pipeline.config import BuildSettings, CheckSettings, ExportSettings
from pipeline.draft import draft
from pipeline.prompts import prompts_of
from pipeline.record import Recorded, record_goldens
from pipeline.register import cache_argument, register
from pipeline.tasks.plan import DynamicAxes, MethodPlan
from pipeline.tasks.task import Constants, Task
from runners.errors import UserError

_EXAMPLE_TOKENS = 8  # of the dynamic axis; any length but 0 and 1, which torch would take for fixed


def plan(registered: Registered, settings: ExportSettings) -> list[MethodPlan]:
    """Return how each method of ``settings.methods`` is traced.

    Raises:
        UserError: the model's forward takes no cache, has a window that is shorter than ``export.max_prefill_length``,
            or a cache that cannot take back what ``verify`` wrote.
    """
    cache_name = cache_argument(registered.model)
    longest = longest_call(registered, settings)
    if "verify" in settings.methods:
        _require_full_cache(registered)
    lengths = {"forward": longest, "decode": 1, "verify": settings.max_draft_tokens + 1}
    return [_method(name, lengths[name], registered, settings, cache_name) for name in settings.methods]


def _require_full_cache(registered: Registered) -> None:
    """Tokens that turn out wrong are taken back, and only where each has an entry of its own can they be."""
    assert registered.layout is not None
    strange = next((tensor for tensor in registered.layout.tensors if tensor.kind != "full"), None)
    if strange is not None:
        what = "a sliding window" if strange.kind == "sliding" else "a recurrent state"
        raise UserError(
            f"export.methods: verify takes back tokens that were guessed wrong, and {type(registered.model).__name__} "
            f"has layers with {what} ({strange.path}), which cannot go back; leave verify out."
        )


def longest_call(registered: Registered, settings: ExportSettings) -> int:
    """Return the tokens that one call takes at most: a ring takes no more than it holds.

    Raises:
        UserError: the configuration asks for more.
    """
    assert registered.cache is not None and registered.layout is not None
    windows = [layer.max_cache_len for layer in registered.cache.layers if getattr(layer, "is_sliding", False)]
    limit = min([registered.layout.max_length, *windows])
    if settings.max_prefill_length is not None and settings.max_prefill_length > limit:
        raise UserError(
            f"export.max_prefill_length: {settings.max_prefill_length} tokens a call, but the model's smallest window "
            f"has {limit}; set it to {limit} or less (a longer prompt is fed in several calls)."
        )
    return settings.max_prefill_length or limit


def _method(name: str, longest: int, registered: Registered, settings: ExportSettings, cache_name: str) -> MethodPlan:
    assert isinstance(registered.cache, DeviceCache) and registered.entry is not None
    example = min(_EXAMPLE_TOKENS, longest)
    keeps_last = settings.logits == "last" and name != "verify"
    has_argument = "logits_to_keep" in inspect.signature(registered.model.forward).parameters
    keep = {"logits_to_keep": 1} if keeps_last and has_argument else {}
    dynamic = {1: Dim("tokens", min=1, max=longest)} if longest > 1 else None
    leaves: list[DynamicAxes | None] = [None] * len(registered.entry.named_leaves(registered.cache))
    cache, rows = registered.cache, registered.cache.rows
    position = f"{cache_name}_position"
    plan = MethodPlan(
        name=name,
        kwargs={"input_ids": torch.zeros(rows, example, dtype=torch.int64), cache_name: cache, **keep},
        dynamic_shapes={"input_ids": dynamic, cache_name: leaves, **dict.fromkeys(keep)},
        input_names={"input_ids": "tokens", position: "position"},
        outputs=("logits",),
        cache=cache_name,
        last_logits=keeps_last and not has_argument and longest > 1,
        top_k=settings.top_k,
    )
    if rows == 1:
        return plan
    # Rows stand at positions of their own: the model is told them, and they are those at which the cache is written.
    positions = torch.zeros(rows, example, dtype=torch.int64)
    cache = copy(cache)  # the layers are shared; methods differ in the number of their tokens
    cache.position = positions
    return replace(
        plan,
        kwargs={**plan.kwargs, cache_name: cache, "position_ids": positions.clone()},
        dynamic_shapes={**plan.dynamic_shapes, "position_ids": dynamic, cache_name: [dynamic, *leaves[1:]]},
        same_as={"position_ids": position},
    )


def constant_methods(loaded: Loaded, facts: ProgramFacts) -> Constants:
    """Return the constants that the stock runner reads.

    ``get_max_seq_len`` is also its prefill chunk; where it is smaller than the context, the stock runner takes the
    model for one with a sliding window.
    """
    assert loaded.tokenizer is not None and facts.cache is not None and loaded.identity.vocabulary_size is not None
    tokenizer = loaded.tokenizer.info
    return {
        "get_max_seq_len": facts.signatures["forward"].inputs[0].shape[1],
        "get_max_context_len": facts.cache.max_length,
        "get_bos_id": tokenizer.bos_id if tokenizer.bos_id is not None else -1,
        "get_eos_ids": list(tokenizer.eos_ids),
        "get_vocab_size": loaded.identity.vocabulary_size,
        "enable_dynamic_shape": True,
        "use_kv_cache": True,
        "use_sdpa_with_kv_cache": facts.cache.attention == "custom",
    }


def _architectures() -> Collection[str]:
    return set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


def _is_checked(check: CheckSettings) -> bool:
    return bool(check.prompts or check.perplexity)


def _prepare(loaded: Loaded, settings: BuildSettings) -> JsonValue:
    assert loaded.tokenizer is not None
    prompts = prompts_of(settings.check, loaded.tokenizer, settings.cache.max_length)
    return [prompt.ids.tolist() for prompt in prompts]


def _draft(loaded: Loaded, settings: BuildSettings, package: Path) -> Sequence[torch.Tensor]:
    assert loaded.tokenizer is not None
    prompts = prompts_of(settings.check, loaded.tokenizer, settings.cache.max_length)
    return draft(package, prompts, settings.check.steps, loaded.tokenizer.info.eos_ids)


def _record(
    loaded: Loaded, quantized: Quantized, settings: BuildSettings, drafts: Sequence[torch.Tensor] | None
) -> Recorded:
    assert loaded.tokenizer is not None
    return record_goldens(loaded, quantized, loaded.tokenizer, settings.check, settings.cache.max_length, drafts)


TEXT_GENERATION = Task(
    name="text-generation",
    auto_model=AutoModelForCausalLM,
    architectures=_architectures,
    needs_tokenizer=True,
    register=register,
    plan=plan,
    constant_methods=constant_methods,
    is_checked=_is_checked,
    draft=_draft,
    record=_record,
    prepare=_prepare,
)
