"""Do not decompose a program that has nothing left to decompose.

executorch decomposes a program three times: to make it functional, then all but what the backend wants whole, then the
rest. Each is a trace of the whole program through autograd; of a functional program that holds no operator of the table
it gives the same program back.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from executorch.exir.graph_module import contains_any_call_fn_target_op
from torch.export import ExportedProgram

from pipeline.quick.remembered_values import functional_operator
from pipeline.substitution import replaced

DecompositionTable = Mapping[torch._ops.OperatorBase, Callable[..., object]]

# In the table, but decomposed to themselves.
_KEPT = {torch.ops.aten.sym_size.int}
# What decomposition makes of an operator that writes its inputs.
_FUNCTIONAL_CALLS = (torch.ops.higher_order.auto_functionalized, torch.ops.higher_order.auto_functionalized_v2)


@contextmanager
def decomposed_once() -> Iterator[None]:
    """Within the scope ``run_decompositions`` copies the graph of a program in which the table finds nothing."""
    original = ExportedProgram.run_decompositions

    @functools.wraps(original)
    def only_where_needed(
        self: ExportedProgram, decomp_table: DecompositionTable | None = None, decompose_custom_triton_ops: bool = False
    ) -> ExportedProgram:
        if decomp_table is None or decompose_custom_triton_ops or not is_decomposed(self, decomp_table):
            return original(self, decomp_table, decompose_custom_triton_ops)
        return _with_own_graph(self)

    with replaced(ExportedProgram, "run_decompositions", only_where_needed):
        yield


def is_decomposed(program: ExportedProgram, table: DecompositionTable) -> bool:
    """Whether a program is functional and holds no operator of ``table``.

    The dialect tells that a program has been decomposed before, which is what removes autograd and its modes.
    """
    pending = set(table) - _KEPT
    if program.dialect != "ATEN" or contains_any_call_fn_target_op(program.graph_module, pending):
        return False
    return all(_is_functional(node.target) for node in program.graph.nodes if node.op == "call_function")


def _is_functional(target: object) -> bool:
    return target in _FUNCTIONAL_CALLS or functional_operator(target) is not None


def _with_own_graph(program: ExportedProgram) -> ExportedProgram:
    """A program whose graph and signature may be changed without a trace in ``program``; the tensors are shared."""
    module = copy.deepcopy(program.graph_module)
    for mine, original in zip(module.graph.nodes, program.graph.nodes, strict=True):
        mine.name = original.name  # the signature goes by name, and a copy renames what is a word of Python
    module.recompile()
    return ExportedProgram(
        root=module,
        graph=module.graph,
        graph_signature=copy.deepcopy(program.graph_signature),
        state_dict=program.state_dict,
        range_constraints=dict(program.range_constraints),
        module_call_graph=copy.deepcopy(program.module_call_graph),
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=[program.verifier],
    )
