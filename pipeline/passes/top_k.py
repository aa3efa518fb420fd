"""Return the likeliest tokens of each row of logits in the place of the logits.

S rows (tokens of a call, or the last one alone), V vocabulary, N tokens chosen. One core operator does it: cutting the
vocabulary into blocks first, so that a backend finds the largest of each, won nothing that a step would notice.
"""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, OutputKind, OutputSpec, TensorArgument
from torch.fx import Node
from torch.utils import _pytree as pytree

from runners.errors import UserError

_ATEN = torch.ops.aten


def top_k(program: ExportedProgram, count: int) -> ExportedProgram:
    """Put float32 ``[1, S, N]`` logits, the largest first, and their int64 ids in the place of ``[1, S, V]`` logits.

    Args:
        program: its cache has been placed, and the logits are its first user output.
        count: N.

    Raises:
        UserError: the vocabulary has fewer tokens.
    """
    output = program.graph_module.graph.output_node()
    specs = list(program.graph_signature.output_specs)
    place = [spec.kind for spec in specs].index(OutputKind.USER_OUTPUT)
    logits = output.args[0][place]
    size = logits.meta["val"].shape[-1]
    if count > size:
        raise UserError(f"export.top_k: {count} tokens of a vocabulary of {size}; give {size} or less.")
    pair = _pair(logits, count, output)
    output.args = ((*output.args[0][:place], *pair, *output.args[0][place + 1 :]),)
    named = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None) for node in pair]
    program.graph_module.recompile()
    return _with_outputs(program, [*specs[:place], *named, *specs[place + 1 :]])


def _pair(logits: Node, count: int, before: Node) -> list[Node]:
    """The two nodes. The likeliest token alone is found by a maximum, which takes half of the time of a selection."""
    target = _ATEN.max.dim if count == 1 else _ATEN.topk.default
    arguments = (-1, True) if count == 1 else (count, -1)
    graph = before.graph
    with graph.inserting_before(before):
        found = graph.call_function(target, (logits, *arguments))
        pair = [graph.call_function(operator.getitem, (found, index)) for index in range(2)]
    found.meta["val"] = tuple(target(logits.meta["val"], *arguments))
    for index, node in enumerate(pair):
        node.meta["val"] = found.meta["val"][index]
    return pair


def _with_outputs(program: ExportedProgram, specs: list[OutputSpec]) -> ExportedProgram:
    """The program anew with its new signature, so that torch verifies it."""
    call = program.module_call_graph[0]
    count = sum(spec.kind == OutputKind.USER_OUTPUT for spec in specs)
    signature = replace(call.signature, out_spec=pytree.tree_flatten(tuple(range(count)))[1])
    return ExportedProgram(
        root=program.graph_module,
        graph=program.graph_module.graph,
        graph_signature=ExportGraphSignature(program.graph_signature.input_specs, specs),
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=[replace(call, signature=signature)],
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=[program.verifier],
    )
