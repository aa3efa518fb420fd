"""Stage: plan memory and write the ``.pte`` file; and the budget that its methods are held against."""

from __future__ import annotations

from pathlib import Path

from executorch.exir import ExecutorchBackendConfig
from executorch.exir.passes import MemoryPlanningPass

from pipeline.artifacts import Emitted, EmittedFacts, Lowered, Signature
from pipeline.config import LowerSettings
from pipeline.passes.upper_bounds import UpperBounds
from pipeline.quick.lowering import quick_lowering
from runners.errors import UserError
from runners.manifest import Delegation, Method, OperatorCount
from runners.pte import (
    BUILT_IN_OPERATORS,
    MethodDescription,
    backends_required,
    operators_required,
    read_program,
)


def emit(lowered: Lowered, constant_methods: dict[str, int | bool | list[int]], target: Path) -> Emitted:
    """Write the program to ``target`` and describe it from the file itself."""
    facts, methods = lowered.facts, list(lowered.delegated_operators)
    settings = ExecutorchBackendConfig(
        run_reinplace_pass=True,  # write the cache where it lies
        sym_shape_eval_pass=UpperBounds(),  # plan for the largest bounded length
        memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False, share_mutable_buffers=len(methods) > 1),
    )
    with quick_lowering():
        program = lowered.programs.to_executorch(settings)
    with target.open("wb") as file:
        program.write_to_file(file)
    description = read_program(target)
    found = {
        m.name: _method(m, lowered.delegated_operators[m.name], facts.signatures[m.name]) for m in description.methods
    }
    emitted = EmittedFacts(
        methods=found,
        constant_methods=constant_methods,
        backends=list(backends_required(description)),
        operators=list(operators_required(description)),
        cache=facts.cache,
        quantization=facts.quantization,
    )
    return Emitted(target, emitted)


def _method(method: MethodDescription, delegated: int, signature: Signature) -> Method:
    undelegated = [
        OperatorCount(name=o.name, count=o.count) for o in method.operators if not o.name.startswith(BUILT_IN_OPERATORS)
    ]
    delegates = sum(d.count for d in method.delegates)
    return Method(
        inputs=signature.inputs,
        outputs=signature.outputs,
        planned_bytes=sum(method.planned_bytes),
        delegation=Delegation(delegates=delegates, delegated_operators=delegated, undelegated=undelegated),
    )


def check_budget(methods: dict[str, Method], settings: LowerSettings) -> None:
    """Hold each method against the budget of the configuration.

    Raises:
        UserError: a method has more delegates than ``lower.max_delegates``, or leaves an operator undelegated that
            ``lower.allowed_undelegated`` does not list.
    """
    for name, method in methods.items():
        delegation = method.delegation
        if settings.max_delegates is not None and delegation.delegates > settings.max_delegates:
            raise UserError(
                f"lower.max_delegates: method {name} has {delegation.delegates} delegates, the budget allows "
                f"{settings.max_delegates}. Operators between them: {_listed(delegation)}."
            )
        if settings.allowed_undelegated is None:
            continue
        refused = [o.name for o in delegation.undelegated if o.name not in settings.allowed_undelegated]
        if refused:
            raise UserError(
                f"lower.allowed_undelegated: method {name} leaves {', '.join(refused)} to portable kernels; allow "
                "them, or change the model or backend so that they are delegated."
            )


def _listed(delegation: Delegation) -> str:
    return ", ".join(f"{o.count} {o.name}" for o in delegation.undelegated)
