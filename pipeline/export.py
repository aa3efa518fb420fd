"""Stage: trace the model's own ``forward`` with its cache as an input, then place the cache."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

from pipeline.artifacts import Exported, ProgramFacts, Registered
from pipeline.attention import attention_of, require_custom
from pipeline.caches import registered as pytree_scope
from pipeline.config import ExportSettings
from pipeline.passes.drop_assertions import drop_assertions
from pipeline.passes.lift_cache import CacheLeaf, lift_cache
from pipeline.signature import signature_of
from pipeline.tasks import text_generation
from pipeline.tasks.plan import MethodPlan

_PLANS = {"text-generation": text_generation.plan}


def export(registered: Registered, settings: ExportSettings, task: str, notes: dict[str, str]) -> Exported:
    """Return one functional program a method, the cache placed as ``registered.layout`` says.

    Raises:
        UserError: the model does not fit the task, does not use the cache it is given, or attends by code of its own
            where the attention is to be ``custom``.
    """
    plans = _PLANS[task](registered, settings)
    with pytree_scope(registered.entry), attention_of(registered.model, settings.attention):
        programs = {plan.name: _trace(plan, registered) for plan in plans}
    signatures = {plan.name: signature_of(programs[plan.name], plan.outputs, registered.layout) for plan in plans}
    return Exported(programs, ProgramFacts(signatures=signatures, cache=registered.layout, quantization=notes))


def _trace(plan: MethodPlan, registered: Registered) -> ExportedProgram:
    with torch.no_grad():
        program = torch.export.export(
            registered.model, (), plan.kwargs, dynamic_shapes=plan.dynamic_shapes, strict=False
        ).run_decompositions({})
    if registered.layout.attention == "custom":
        require_custom(program, registered.model, len(registered.cache.layers))
    leaves = [
        CacheLeaf(_placeholder(plan.cache, path), f"cache.{path}")
        for path, _ in registered.entry.named_leaves(registered.cache)
        if path != "position"
    ]
    program = lift_cache(program, leaves, registered.layout.placement, plan.outputs, plan.input_names)
    return drop_assertions(program)


def _placeholder(argument: str, path: str) -> str:
    """The name that torch.export gives the placeholder of a leaf."""
    return f"{argument}_{path}".replace(".", "_")
