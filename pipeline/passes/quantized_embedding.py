"""Read rows of a quantized embedding table, instead of dequantizing the whole table at each step.

V vocabulary, D embedding width, G features that share a scale.
"""

from __future__ import annotations

import torch
from executorch.exir.passes import (
    _quant_patterns_and_replacements as quantized_operators,
)  # registers both operator sets
from torch.export import ExportedProgram
from torch.fx import Node

from pipeline.passes.constants import add_constant
from runners.errors import UserError

_BITS_OF_RANGE = {(-128, 127): 8, (-8, 7): 4}


def quantized_embedding(program: ExportedProgram) -> ExportedProgram:
    """Replace ``embedding(dequantize_affine(table), ids)`` by the operator that dequantizes the rows it reads.

    Raises:
        UserError: the table's range is neither that of 8 nor that of 4 bits, or its zero points are not 0.
    """
    graph = program.graph_module.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default):
        table = node.args[0]
        if table.target is torch.ops.torchao.dequantize_affine.default:
            _replace(program, node, table)
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program


def _replace(program: ExportedProgram, node: Node, table: Node) -> None:
    weight, _, scales, zero_points, _, low, high = table.args[:7]
    bits = _BITS_OF_RANGE.get((low, high))
    if bits is None or _value(program, zero_points).any():
        raise UserError(
            f"quantize.embedding: {weight.name} is quantized to {low}…{high}, or has zero points other than 0; only "
            "symmetric 8-bit and 4-bit tables have an operator."
        )
    operator = torch.ops.quantized_decomposed.embedding_byte.default
    if bits == 4:
        operator = torch.ops.quantized_decomposed.embedding_4bit.default
        packed = quantized_operators._pack_embedding_weight(_value(program, weight), 4)  # uint8 [V, D / 2]
        weight = add_constant(program, f"{weight.name}_packed", packed)
    grouped = _value(program, scales)
    if grouped.dim() == 2 and grouped.shape[1] == 1:
        scales = add_constant(program, f"{scales.name}_row", grouped[:, 0].contiguous())  # [V]: one group a row
    # in place: the node keeps its name, by which the signature knows an output
    node.target, node.args, node.kwargs = operator, (weight, scales, None, low, high, node.args[1]), {}


def _value(program: ExportedProgram, placeholder: Node) -> torch.Tensor:
    spec = next(s for s in program.graph_signature.input_specs if s.arg.name == placeholder.name)
    assert spec.target is not None
    held = program.state_dict.get(spec.target)
    return held if held is not None else program.constants[spec.target]
