"""Return the likeliest tokens of each row of logits in the place of the logits.

S rows (tokens of a call, or the last one alone), V vocabulary, N tokens chosen. One core operator would do it, but its
portable kernel copies all of a row, with its ids, to memory that it asks for in each call. So the vocabulary is cut
into blocks, of which only the largest logits are found first, where that leaves little to look through.
"""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, OutputKind, OutputSpec, TensorArgument
from torch.fx import Node
from torch.fx.node import Argument, map_arg
from torch.utils import _pytree as pytree

from runners.errors import UserError

_ATEN = torch.ops.aten
_GATHERED = 4  # work of a logit that is picked out of its block, in those that are only compared; roughly


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
    """The two nodes. The likeliest token alone is found by a maximum, which takes less than a selection."""
    size = logits.meta["val"].shape[-1]
    width = _width(size, count)
    with before.graph.inserting_before(before):
        if count == 1:
            return _both(_added(_ATEN.max.dim, logits, -1, True))
        if width is None:
            return _both(_added(_ATEN.topk.default, logits, count, -1))
        return _by_blocks(logits, count, width)


def _width(size: int, count: int) -> int | None:
    """Tokens of a block, where the vocabulary can be cut into equal ones that save more than half of the work."""
    work = {width: size // width + _GATHERED * count * width for width in range(2, size // count + 1)}
    fitting = [width for width in work if size % width == 0 and 2 * work[width] < size]
    return min(fitting, key=work.__getitem__, default=None)


def _by_blocks(logits: Node, count: int, width: int) -> list[Node]:
    """The likeliest tokens lie in those blocks whose largest logits are the largest: only these are looked through."""
    blocks = _added(_ATEN.view.default, logits, [1, -1, logits.meta["val"].shape[-1] // width, width])
    _, chosen = _both(_added(_ATEN.topk.default, _added(_ATEN.amax.default, blocks, [-1]), count, -1))  # [1, S, N]
    index = _added(_ATEN.expand.default, _added(_ATEN.unsqueeze.default, chosen, -1), [-1, -1, -1, width])
    inside = _added(_ATEN.view.default, _added(_ATEN.gather.default, blocks, 2, index), [1, -1, count * width])
    values, places = _both(_added(_ATEN.topk.default, inside, count, -1))
    block = _added(
        _ATEN.gather.default, chosen, -1, _added(_ATEN.div.Scalar_mode, places, width, rounding_mode="floor")
    )
    first = _added(_ATEN.mul.Scalar, block, width)
    return [values, _added(_ATEN.add.Tensor, first, _added(_ATEN.remainder.Scalar, places, width))]


def _added(target: OpOverload, source: Node, *arguments: Argument, **named: Argument) -> Node:
    """A new node, with what it gives; in a scope that says where."""
    node = source.graph.call_function(target, (source, *arguments), named)
    given, by_name = map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
    node.meta["val"] = target(*given, **by_name)
    return node


def _both(pair: Node) -> list[Node]:
    """The two outputs of a node."""
    nodes = [pair.graph.call_function(operator.getitem, (pair, index)) for index in range(2)]
    for index, node in enumerate(nodes):
        node.meta["val"] = pair.meta["val"][index]
    return nodes


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
