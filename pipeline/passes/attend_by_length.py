"""Attend to a prompt by products of the backend, and otherwise by ``llama::custom_sdpa``.

For one token the operator is the quicker one, and it never holds all scores, which for very many tokens would take much
memory. In a method of any number of tokens a condition decides at each call.

Legend: as in ``sdpa_call.py``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from executorch.exir.dialects._ops import ops as exir_ops
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from pipeline.backends.part import LowerPart
from pipeline.passes.attention_products import Products
from pipeline.passes.sdpa_call import SDPA, Call, as_it_is, fake, write, write_as, write_number

_aten = exir_ops.edge.aten
_prim = exir_ops.backend.executorch_prim
_MOST_SCORES = 1 << 24  # of a layer: 64 MiB of float32

Write: TypeAlias = Callable[[GraphModule, Call, Node], Node]  # module of the graph, call, S -> attention [K, S, G, D]


def attend_by_length(program: ExportedProgram, lower_part: LowerPart) -> ExportedProgram:
    """Rewrite each call of the operator that takes several tokens, or any number.

    After the backend has chosen: what is put in here would only be cut into delegates of its own.

    Args:
        program: an edge program whose delegates are made; it is changed in place, and returned.
        lower_part: makes a program one delegate of the backend.
    """
    module, products = program.graph_module, Products(lower_part)
    lengths: dict[tuple[str, int], _Length] = {}  # by the expression of S and the limit, which layers share
    for node in module.graph.find_nodes(op="call_function", target=SDPA):
        call = Call.of(node)
        most = _most_by_products(call, products) if call is not None else 0
        if call is None or most == 0:
            continue
        with module.graph.inserting_before(node), fake(node):
            if isinstance(call.tokens, int):
                new = products.write(module, call, call.tokens, most)
            else:
                key = (str(call.tokens), most)
                if key not in lengths:
                    lengths[key] = _Length(call, most)
                new = _conditional(module, call, products, lengths[key])
        node.replace_all_uses_with(new)
        module.graph.erase_node(node)
    module.recompile()
    return program


def _most_by_products(call: Call, products: Products) -> int:
    """Tokens for which products are written: all of a call of a fixed number, or up to a limit; 0: for none.

    In a cache of two entries several tokens can begin at position 0 only. torch then takes the position for a constant,
    which a condition's operand must not be.
    """
    if call.mask is None and call.most_seen < 3:
        return 0
    most = min(call.most_tokens, _MOST_SCORES // (call.heads * call.groups * call.most_seen))
    if most < 2 or (isinstance(call.tokens, int) and most < call.tokens):
        return 0
    return most if products.take(call, most) else 0


class _Length:
    """The number of tokens of a call of the program, and whether it is between 2 and ``most``."""

    def __init__(self, call: Call, most: int) -> None:
        graph = call.query.graph
        self.most = most
        self.tokens = write(graph, torch.ops.aten.sym_size.int, call.query, 1)
        # The runtime's arithmetic has no "and": the quotient is -1 for 1 token, 0 for 2 to most, and then 1 or more.
        above = write_number(graph, _prim.sub.Scalar, operator.sub, self.tokens, 2)
        quotient = write_number(graph, _prim.floordiv.Scalar, operator.floordiv, above, most - 1)
        self.is_prompt = write_number(graph, _prim.eq.Scalar, operator.eq, quotient, 0)


def _conditional(module: GraphModule, call: Call, products: Products, length: _Length) -> Node:
    """Attention ``[K, S, G, D]``, by products or by the operator.

    What a condition returns lies in memory that the next condition uses again, so it is copied.
    """

    def by_products(side: GraphModule, inside: Call, tokens: Node) -> Node:
        return products.write(side, inside, tokens, length.most)

    def by_operator(side: GraphModule, inside: Call, tokens: Node) -> Node:
        return as_it_is(inside)

    graph, operands = call.query.graph, [*call.nodes, length.tokens]
    sides = [_side(module, call, operands, each) for each in (by_products, by_operator)]
    chosen = graph.call_function(torch.ops.higher_order.cond, (length.is_prompt, *sides, operands))
    chosen.meta["val"] = [torch.empty_like(call.query.meta["val"])]
    return write(graph, _aten.clone.default, write_as(graph, chosen.meta["val"][0], operator.getitem, chosen, 0))


def _side(module: GraphModule, call: Call, operands: Sequence[Node], write_side: Write) -> Node:
    """Write one side of a condition as a submodule, and return the node that names it."""
    side = GraphModule(torch.nn.Module(), Graph())
    places = {}
    for number, outside in enumerate(operands):
        places[outside] = side.graph.placeholder(f"operand_{number}")
        places[outside].meta["val"] = outside.meta["val"]
    side.graph.output([write_side(side, call.at(places), places[operands[-1]])])
    side.recompile()
    name = f"sdpa_{len(list(module.children()))}"
    module.add_module(name, side)
    return call.query.graph.get_attr(name)
