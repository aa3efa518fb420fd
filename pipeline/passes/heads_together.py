"""Read the keys once for all query heads that share them, where ``llama::custom_sdpa`` gets one token.

The operator goes through its query heads one by one and reads keys and values anew for each. Of one token the G query
heads of a key head may be given as G tokens of one head instead: then it reads them once, in one matrix product. That
call must not be causal, since all G "tokens" see the same entries; without a mask and not causal the operator reads as
many entries as its start and its tokens say, so the start is G - 1 before the position. That may be below 0: only the
sum counts.

In a method of any number of tokens a condition decides, at each call, between this and the operator as it was.

Legend: S tokens of a call, K key heads, each a sequence to the operator, G query heads of each, D head width, N entries
seen.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from executorch.exir.dialects._ops import ops as exir_ops
from torch._dispatch.python import enable_python_dispatcher
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

_SDPA = exir_ops.edge.llama.custom_sdpa.default
_aten = exir_ops.edge.aten
_prim = exir_ops.backend.executorch_prim
_ARGUMENTS = ("query", "key", "value", "start_pos", "attn_mask", "dropout_p", "is_causal", "scale")

Target: TypeAlias = Callable[..., object]


def heads_together(program: ExportedProgram) -> ExportedProgram:
    """Rewrite each call of the operator that takes one token, or any number; of an edge program, its delegates made.

    After the backend has chosen: what is put in here would only be cut into delegates of its own.
    """
    module = program.graph_module
    lengths: dict[str, _Length] = {}  # by the expression of S, which all layers share
    for node in module.graph.find_nodes(op="call_function", target=_SDPA):
        call = _Call.of(node)
        if call is None or call.groups == 1 or (isinstance(call.tokens, int) and call.tokens > 1):
            continue
        with module.graph.inserting_before(node), _fake(node):
            if call.tokens == 1:
                new = _together(call)
            else:
                symbol = str(call.tokens)
                if symbol not in lengths:
                    lengths[symbol] = _Length.of(call)
                new = _conditional(module, call, lengths[symbol])
        node.replace_all_uses_with(new)
        module.graph.erase_node(node)
    module.recompile()
    return program


@dataclass(frozen=True)
class _Call:
    """What a call of the operator takes, in the graph of the program or of one side of a condition."""

    query: Node  # [K, S, G, D]
    key: Node  # [K, N, 1, D]
    value: Node  # [K, N, 1, D]
    start: Node | int
    mask: Node | None  # [S, N], and then the operator is not causal
    scale: float | None

    @classmethod
    def of(cls, node: Node) -> _Call | None:
        """None for a call in another way than the two of ``attention.py``: causal, or with a mask."""
        given = dict(zip(_ARGUMENTS, node.args, strict=False))
        mask = given.get("attn_mask")
        if given.get("dropout_p", 0.0) != 0.0 or given.get("is_causal", False) is not (mask is None):
            return None
        return cls(given["query"], given["key"], given["value"], given["start_pos"], mask, given.get("scale"))

    @property
    def tokens(self) -> int | torch.SymInt:
        """S."""
        return self.query.meta["val"].shape[1]

    @property
    def groups(self) -> int:
        """G."""
        return int(self.query.meta["val"].shape[2])

    @property
    def nodes(self) -> list[Node]:
        return [x for x in (self.query, self.key, self.value, self.start, self.mask) if isinstance(x, Node)]

    def at(self, places: dict[Node, Node]) -> _Call:
        """The same call where each of its nodes is another."""
        start = places[self.start] if isinstance(self.start, Node) else self.start
        mask = places[self.mask] if self.mask is not None else None
        return _Call(places[self.query], places[self.key], places[self.value], start, mask, self.scale)


@dataclass(frozen=True)
class _Length:
    """The number of tokens of a call of the program."""

    tokens: Node
    is_one: Node

    @classmethod
    def of(cls, call: _Call) -> _Length:
        tokens = _write(call.query.graph, torch.ops.aten.sym_size.int, call.query, 1)
        return cls(tokens, _write_number(call.query.graph, _prim.eq.Scalar, operator.eq, tokens, 1))


def _each(call: _Call, tokens: Node) -> Node:
    """Attention ``[K, S, G, D]`` by the operator as it is."""
    return _attend(call, call.query, call.start, call.mask, causal=call.mask is None)


def _together(call: _Call) -> Node:
    """Attention ``[K, 1, G, D]`` of one token."""
    graph, (heads, _, groups, width) = call.query.graph, call.query.meta["val"].shape
    rows = _write(graph, _aten.view_copy.default, call.query, [heads, groups, 1, width])
    if call.mask is None:
        start, mask = _write_number(graph, _prim.sub.Scalar, operator.sub, call.start, groups - 1), None
    else:
        start, mask = call.start, _write(graph, _aten.expand_copy.default, call.mask, [groups, -1])
    out = _attend(call, rows, start, mask, causal=False)
    return _write(graph, _aten.view_copy.default, out, [heads, 1, groups, width])


def _first_together(call: _Call, tokens: Node) -> Node:
    """``_together`` of the first token; its shape says S tokens, as the other side of the condition does.

    Here S is 1 whenever it runs, and memory for one token is planned, not for the most that S can be.
    """
    graph = call.query.graph
    mask = _write(graph, _aten.slice_copy.Tensor, call.mask, 0, 0, 1) if call.mask is not None else None
    query = _write(graph, _aten.slice_copy.Tensor, call.query, 1, 0, 1)
    return _write(
        graph, _aten.expand_copy.default, _together(replace(call, query=query, mask=mask)), [-1, tokens, -1, -1]
    )


def _conditional(module: GraphModule, call: _Call, length: _Length) -> Node:
    """Attention ``[K, S, G, D]``, by ``_first_together`` if S is 1 and by ``_each`` otherwise.

    What a condition returns lies in memory that the next condition uses again, so it is copied.
    """
    graph, operands = call.query.graph, [*call.nodes, length.tokens]
    sides = [_side(module, call, operands, write) for write in (_first_together, _each)]
    chosen = graph.call_function(torch.ops.higher_order.cond, (length.is_one, *sides, operands))
    chosen.meta["val"] = [torch.empty_like(call.query.meta["val"])]
    return _write(graph, _aten.clone.default, _write(graph, operator.getitem, chosen, 0))


def _side(module: GraphModule, call: _Call, operands: Sequence[Node], write: Callable[[_Call, Node], Node]) -> Node:
    """Write one side of a condition as a submodule, and return the node that names it."""
    graph = Graph()
    places = {}
    for number, outside in enumerate(operands):
        places[outside] = graph.placeholder(f"operand_{number}")
        places[outside].meta["val"] = outside.meta["val"]
    graph.output([write(call.at(places), places[operands[-1]])])
    name = f"sdpa_{len(list(module.children()))}"
    module.add_module(name, GraphModule(torch.nn.Module(), graph))
    return call.query.graph.get_attr(name)


def _attend(call: _Call, query: Node, start: Node | int, mask: Node | None, causal: bool) -> Node:
    return _write(query.graph, _SDPA, query, call.key, call.value, start, mask, 0.0, causal, call.scale)


def _write(graph: Graph, target: Target, *args: object) -> Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*torch.fx.node.map_arg(args, lambda each: each.meta["val"]))
    return node


def _write_number(graph: Graph, target: Target, compute: Target, a: Node | int, b: int) -> Node:
    node = graph.call_function(target, (a, b))
    node.meta["val"] = compute(a.meta["val"] if isinstance(a, Node) else a, b)
    return node


@contextmanager
def _fake(node: Node) -> Iterator[None]:
    """Within the scope operators on a program's values compute shapes alone."""
    with node.meta["val"].fake_mode, enable_python_dispatcher():
        yield
