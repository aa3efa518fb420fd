"""Read the inputs and outputs of an exported program, with the bounds of each dynamic dimension."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree
from torch.utils._sympy.value_ranges import bound_sympy

from pipeline.artifacts import Signature
from runners.manifest import Cache, TensorSpec


def signature_of(program: ExportedProgram, outputs: Sequence[str], cache: Cache | None) -> Signature:
    """Return the signature of a program whose cache has been placed.

    Args:
        program: as ``lift_cache`` returns it.
        outputs: names of its outputs before those of the cache.
        cache: with placement ``io`` its tensors are the last inputs and the last outputs, named by their paths; None:
            the model has none.
    """
    values = {node.name: node.meta["val"] for node in program.graph_module.graph.nodes if "val" in node.meta}
    user_in = [s.arg.name for s in program.graph_signature.input_specs if s.kind == InputKind.USER_INPUT]
    user_out = [s.arg.name for s in program.graph_signature.output_specs if s.kind == OutputKind.USER_OUTPUT]
    tensors = [t.path for t in cache.tensors] if cache is not None and cache.placement == "io" else []
    names_in = [*_input_names(program)[: len(user_in) - len(tensors)], *tensors]
    names_out = [*outputs, *tensors]
    return Signature(
        inputs=[_spec(name, values[x], program) for name, x in zip(names_in, user_in, strict=True)],
        outputs=[_spec(name, values[x], program) for name, x in zip(names_out, user_out, strict=True)],
    )


def _input_names(program: ExportedProgram) -> list[str]:
    _, kwargs = program.example_inputs
    return [str(path[0].key) for path, _ in pytree.tree_flatten_with_path(kwargs)[0]]


def _spec(name: str, value: torch.Tensor, program: ExportedProgram) -> TensorSpec:
    bounds = [_bounds(size, program) for size in value.shape]
    dtype = str(value.dtype).removeprefix("torch.")
    return TensorSpec(name=name, dtype=dtype, shape=[b[1] for b in bounds], min_shape=[b[0] for b in bounds])


def _bounds(size: int | torch.SymInt, program: ExportedProgram) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    bounds = bound_sympy(size.node.expr, program.range_constraints)
    return int(bounds.lower), int(bounds.upper)
