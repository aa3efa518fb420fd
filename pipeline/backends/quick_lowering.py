"""Lower with the same result and less repeated work.

executorch 1.5.1 interprets the whole program, node by node, in every pass, and decomposes it three times. Two substitutions, each for the length
of a scope, leave out what gives nothing new.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from executorch.exir.graph_module import contains_any_call_fn_target_op
from executorch.exir.pass_base import _ExportPassBase
from torch.export import ExportedProgram

from pipeline.backends.short_provenance import short_provenance
from pipeline.backends.xnnpack_passes import only_needed_passes


@contextmanager
def quick_lowering() -> Iterator[None]:
    """All that shortens lowering without changing its result; wraps ``to_edge_transform_and_lower`` and ``to_executorch``."""
    with ExitStack() as stack:
        for scope in (short_provenance, only_needed_passes, remembered_values, decomposed_once):
            stack.enter_context(scope())
        yield


@contextmanager
def remembered_values() -> Iterator[None]:
    """Within the scope, a pass that meets the same operator on the very same values takes the result another pass has computed.

    Values are fake tensors: shapes, dtypes and strides. An operator's result depends on nothing else, so it may be shared.
    """
    memory: dict[object, tuple[object, object]] = {}
    original = _ExportPassBase._fx

    @functools.wraps(original)
    def with_memory(self, kind, target, args, kwargs, meta):
        inner = self.interpreter
        self.interpreter = _Remembering(inner, memory, self.tracer.fake_tensor_mode)
        try:
            return original(self, kind, target, args, kwargs, meta)
        finally:
            self.interpreter = inner

    _ExportPassBase._fx = with_memory
    try:
        yield
    finally:
        _ExportPassBase._fx = original


class _Remembering:
    """Stands in for a pass's interpreter for one node."""

    def __init__(self, inner, memory, mode) -> None:
        self.output = inner.output
        self._inner, self._memory, self._mode = inner, memory, mode

    def call_function(self, target, args, kwargs):
        operator = _functional(target)
        if operator is None:
            return self._inner.call_function(target, args, kwargs)
        alive: list[object] = [self._mode]
        key = (operator, id(self._mode), _key(args, alive), _key(kwargs, alive))
        if key not in self._memory:
            # The values behind the identities are kept, so that no other value can take their place in memory.
            self._memory[key] = (self._inner.call_function(target, args, kwargs), alive)
        return self._memory[key][0]


def _functional(target: object):
    operator = target._op if isinstance(target, EdgeOpOverload) else target
    if isinstance(operator, torch._ops.OpOverload):
        return None if operator._schema.is_mutable else operator
    return operator if getattr(operator, "__module__", None) in ("_operator", "math") else None


def _key(value: object, alive: list[object]) -> object:
    if isinstance(value, (list, tuple)):
        return (list, *(_key(item, alive) for item in value))
    if isinstance(value, dict):
        return (dict, *((name, _key(item, alive)) for name, item in value.items()))
    if value is None or isinstance(
        value, (bool, int, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
    ):
        return (type(value), value)
    if isinstance(value, float):
        return (float, value.hex())
    alive.append(value)
    return (object, id(value))


@contextmanager
def decomposed_once() -> Iterator[None]:
    """Within the scope, ``run_decompositions`` of a program that has nothing left to decompose is a copy of its graph."""
    original = ExportedProgram.run_decompositions

    @functools.wraps(original)
    def only_where_needed(self, decomp_table=None, *args, **kwargs):
        if decomp_table is None or args or kwargs or not _is_decomposed(self, decomp_table):
            return original(self, decomp_table, *args, **kwargs)
        return _copy(self)

    ExportedProgram.run_decompositions = only_where_needed
    try:
        yield
    finally:
        ExportedProgram.run_decompositions = original


def _is_decomposed(program: ExportedProgram, table) -> bool:
    """Whether the program has been through a decomposition, which is what makes it functional, and holds no operator of ``table``."""
    pending = set(table) - _DECOMPOSED_TO_THEMSELVES
    if program.dialect != "ATEN" or contains_any_call_fn_target_op(program.graph_module, pending):
        return False
    return all(_is_functional(node.target) for node in program.graph.nodes if node.op == "call_function")


_DECOMPOSED_TO_THEMSELVES = {torch.ops.aten.sym_size.int}
_FUNCTIONAL_CALLS = (torch.ops.higher_order.auto_functionalized, torch.ops.higher_order.auto_functionalized_v2)


def _is_functional(target: object) -> bool:
    return target in _FUNCTIONAL_CALLS or _functional(target) is not None


def _copy(program: ExportedProgram) -> ExportedProgram:
    import copy

    module = copy.deepcopy(program.graph_module)
    return ExportedProgram(
        root=module,
        graph=module.graph,
        graph_signature=copy.deepcopy(program.graph_signature),
        state_dict=program.state_dict,
        range_constraints=copy.deepcopy(program.range_constraints),
        module_call_graph=copy.deepcopy(program.module_call_graph),
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=[program.verifier],
    )
