"""Stage: trace a ``forward`` of the model's own with its cache as an input, then place the cache."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.export import ExportedProgram

from pipeline.artifacts import Exported, ProgramFacts, Registered
from pipeline.attention import attention_of
from pipeline.caches import registered as pytree_scope
from pipeline.experts import exportable_experts
from pipeline.passes.drop_assertions import drop_assertions
from pipeline.passes.lift_cache import CacheLeaf, lift_cache
from pipeline.positions import given_positions
from pipeline.signature import signature_of
from pipeline.tasks.plan import MethodPlan


def export(registered: Registered, plans: list[MethodPlan], notes: dict[str, str]) -> Exported:
    """Return one functional program a method, the cache placed as ``registered.layout`` says.

    Args:
        registered: the model and its cache.
        plans: how each method is traced.
        notes: what was done to the weights, for the manifest.

    Raises:
        UserError: the model does not use the cache it is given.
    """
    model = registered.model
    with _scope(registered), attention_of(model, registered.attention), exportable_experts(model):
        programs = {plan.name: _trace(plan, registered) for plan in plans}
    signatures = {plan.name: signature_of(programs[plan.name], _names(plan), registered.layout) for plan in plans}
    return Exported(programs, ProgramFacts(signatures=signatures, cache=registered.layout, quantization=notes))


def _names(plan: MethodPlan) -> list[str]:
    """The names of the outputs in the program."""
    return [plan.output_names.get(output, output) for output in plan.outputs]


def _scope(registered: Registered) -> AbstractContextManager[None]:
    return pytree_scope(registered.entry) if registered.entry is not None else nullcontext()


def _trace(plan: MethodPlan, registered: Registered) -> ExportedProgram:
    with torch.no_grad(), given_positions(registered.model, plan.cache):
        program = torch.export.export(
            registered.model.get_submodule(plan.module),
            (),
            dict(plan.kwargs),
            dynamic_shapes=dict(plan.dynamic_shapes),
            strict=False,
        ).run_decompositions({})
    placement = registered.layout.placement if registered.layout is not None else "io"
    program = lift_cache(program, _leaves(plan, registered), placement, plan.outputs, plan.input_names)
    return drop_assertions(program)


def _leaves(plan: MethodPlan, registered: Registered) -> list[CacheLeaf]:
    if plan.cache is None or registered.entry is None or registered.cache is None:
        return []
    return [
        CacheLeaf(_placeholder(plan.cache, path), f"cache.{path}")
        for path, _ in registered.entry.named_leaves(registered.cache)
        if path != "position"
    ]


def _placeholder(argument: str, path: str) -> str:
    """The name that torch.export gives the placeholder of a leaf."""
    return f"{argument}_{path}".replace(".", "_")
