"""Write complex numbers as pairs of real ones: Llama 4 turns its heads by them, and no device has kernels for them.

``polar`` and ``view_as_complex`` begin a pair, products and changes of shape carry it on, ``view_as_real`` ends it. The
values are equal up to rounding (``x * y`` is the sum of two products either way).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.fx.node import Argument

_ATEN = torch.ops.aten
# Of these, each part of the result is the same operator on the part: they move elements, and compute nothing.
_MOVES = frozenset(
    {
        _ATEN.unsqueeze.default,
        _ATEN.squeeze.dims,
        _ATEN.slice.Tensor,
        _ATEN.select.int,
        _ATEN.expand.default,
        _ATEN.view.default,
        _ATEN.permute.default,
        _ATEN.clone.default,
    }
)


@dataclass(frozen=True)
class _Pair:
    """The two parts of a complex tensor, each of its shape."""

    real: Node
    imaginary: Node


def complex_as_real(program: ExportedProgram) -> ExportedProgram:
    """Replace the complex tensors of a program whose inputs and outputs are real.

    An operator of complex tensors that is not written here stays, and with it those that lead to it.
    """
    graph, pairs = program.graph_module.graph, dict[Node, _Pair]()
    for node in list(graph.nodes):
        write = _WRITERS.get(node.target) if node.op == "call_function" else None
        if write is None:
            continue
        with graph.inserting_before(node):
            write(graph, node, pairs)
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program


def _call(graph: Graph, target: OpOverload, *args: Argument, **kwargs: Argument) -> Node:
    """Add a node, with the value that it has for the values of its arguments."""
    node = graph.call_function(target, args, kwargs)
    values = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    node.meta["val"] = target(*values[0], **values[1])
    return node


def _polar(graph: Graph, node: Node, pairs: dict[Node, _Pair]) -> None:
    size, angle = node.args
    parts = [
        _call(graph, _ATEN.mul.Tensor, size, _call(graph, f, angle)) for f in (_ATEN.cos.default, _ATEN.sin.default)
    ]
    pairs[node] = _Pair(*parts)


def _from_real(graph: Graph, node: Node, pairs: dict[Node, _Pair]) -> None:
    pairs[node] = _Pair(*(_call(graph, _ATEN.select.int, node.args[0], -1, part) for part in (0, 1)))


def _to_real(graph: Graph, node: Node, pairs: dict[Node, _Pair]) -> None:
    if (pair := pairs.get(node.args[0])) is None:
        return
    parts = [_call(graph, _ATEN.unsqueeze.default, part, -1) for part in (pair.real, pair.imaginary)]
    node.replace_all_uses_with(_call(graph, _ATEN.cat.default, parts, -1))


def _moved(graph: Graph, node: Node, pairs: dict[Node, _Pair]) -> None:
    if (pair := pairs.get(node.args[0])) is None:
        return
    rest = node.args[1:]
    parts = (_call(graph, node.target, part, *rest, **node.kwargs) for part in (pair.real, pair.imaginary))
    pairs[node] = _Pair(*parts)


def _product(graph: Graph, node: Node, pairs: dict[Node, _Pair]) -> None:
    x, y = (pairs.get(a) if isinstance(a, Node) else None for a in node.args)

    def times(a: Argument, b: Argument) -> Node:
        return _call(graph, _ATEN.mul.Tensor, a, b)

    if x is not None and y is not None:
        real = _call(graph, _ATEN.sub.Tensor, times(x.real, y.real), times(x.imaginary, y.imaginary))
        imaginary = _call(graph, _ATEN.add.Tensor, times(x.real, y.imaginary), times(x.imaginary, y.real))
        pairs[node] = _Pair(real, imaginary)
    elif (pair := x or y) is not None:
        factor = node.args[1] if x is not None else node.args[0]
        if not isinstance(factor, complex):
            pairs[node] = _Pair(times(pair.real, factor), times(pair.imaginary, factor))


_WRITERS: dict[OpOverload, Callable[[Graph, Node, dict[Node, _Pair]], None]] = {
    _ATEN.polar.default: _polar,
    _ATEN.view_as_complex.default: _from_real,
    _ATEN.view_as_real.default: _to_real,
    _ATEN.mul.Tensor: _product,
    **dict.fromkeys(_MOVES, _moved),
}
