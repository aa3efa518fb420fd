"""Stage: trace a ``forward`` of the model's own with its cache as an input, then place the cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType

import torch
from torch.export import ExportedProgram
from transformers import PreTrainedModel

from pipeline.artifacts import Exported, ProgramFacts, Registered
from pipeline.attention import attention_of
from pipeline.caches import registered as pytree_scope
from pipeline.caches.own_states import state_keeping
from pipeline.experts import exportable_experts
from pipeline.one_graph import one_graph
from pipeline.passes.drop_assertions import drop_assertions
from pipeline.passes.fold_constants import fold_constants
from pipeline.passes.last_logits import last_logits
from pipeline.passes.lift_cache import CacheLeaf, LeafUse, lift_cache
from pipeline.passes.one_input import one_input
from pipeline.passes.top_k import top_k
from pipeline.positions import given_positions
from pipeline.quick.tracing import quick_tracing
from pipeline.register import is_position
from pipeline.signature import signature_of
from pipeline.tasks.plan import Forward, MethodPlan
from runners.choices import TOP_IDS, TOP_LOGITS
from runners.manifest import Cache


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
    with _scope(registered), exportable_experts(model), quick_tracing():
        programs = {plan.name: _trace(plan, registered) for plan in plans}
    signatures = {p.name: signature_of(programs[p.name], _names(p), _layout(p, registered)) for p in plans}
    return Exported(programs, ProgramFacts(signatures=signatures, cache=registered.layout, quantization=notes))


def _names(plan: MethodPlan) -> list[str]:
    """The names of the outputs in the program."""
    names = [plan.output_names.get(output, output) for output in plan.outputs]
    return names if plan.top_k is None else [TOP_LOGITS, TOP_IDS, *names[1:]]


def _layout(plan: MethodPlan, registered: Registered) -> Cache | None:
    """The cache as this method has it."""
    return registered.layout if plan.cache is not None else None


def _scope(registered: Registered) -> AbstractContextManager[None]:
    return pytree_scope(registered.entry) if registered.entry is not None else nullcontext()


def _trace(plan: MethodPlan, registered: Registered) -> ExportedProgram:
    model = registered.model
    keeping = state_keeping(model).scope(model, plan.cache) if plan.cache is not None else nullcontext()
    attending = attention_of(model, plan.attention or registered.attention)
    told = given_positions(model, plan.cache)
    with torch.no_grad(), attending, told, keeping, one_graph(model), _traced(model, plan.forward):
        program = torch.export.export(
            model.get_submodule(plan.module),
            (),
            dict(plan.kwargs),
            dynamic_shapes=dict(plan.dynamic_shapes),
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=plan.defers_guards,
        ).run_decompositions({})
    one_input(program, plan.same_as)
    drop_assertions(program)  # before what only they read is looked for
    placement = registered.layout.placement if registered.layout is not None else "io"
    dropped = (*plan.same_as, *plan.dropped)
    program = lift_cache(program, _leaves(plan, registered), placement, plan.outputs, plan.input_names, dropped)
    if plan.folds_constants:
        fold_constants(program)
    if plan.last_logits:
        program = last_logits(program)
    return top_k(program, plan.top_k) if plan.top_k is not None else program


@contextmanager
def _traced(model: PreTrainedModel, forward: Forward | None) -> Iterator[None]:
    """Inside the scope ``forward`` is the model's; None leaves it its own."""
    if forward is None:
        yield
        return
    model.forward = MethodType(forward, model)
    try:
        yield
    finally:
        del model.forward  # what hid that of its class


def _leaves(plan: MethodPlan, registered: Registered) -> list[CacheLeaf]:
    if plan.cache is None or registered.entry is None or registered.cache is None:
        return []
    return [
        CacheLeaf(_placeholder(plan.cache, path), f"cache.{path}", _use(plan, path))
        for path, _ in registered.entry.named_leaves(registered.cache)
        if not is_position(path)
    ]


def _use(plan: MethodPlan, path: str) -> LeafUse:
    return next((use for beginning, use in plan.leaf_uses.items() if path.startswith(beginning)), "written")


def _placeholder(argument: str, path: str) -> str:
    """The name that torch.export gives the placeholder of a leaf."""
    return f"{argument}_{path}".replace(".", "_")
