"""Compute a value once where a program computes it again from the same values.

Each layer of a model gives the rotary tables the axis of its heads by itself, for example. The backend computes these
together, early, and then each of them is memory that is held until its layer comes.
"""

from __future__ import annotations

from torch.export import ExportedProgram
from torch.fx import Node

from pipeline.passes.purity import is_pure

Key = tuple[object, ...]


def computed_once(program: ExportedProgram) -> ExportedProgram:
    """Let every user of a value that was computed before, by the same operator of the same arguments, use that one."""
    graph = program.graph_module.graph
    results = set(graph.output_node().all_input_nodes)  # the signature knows them by name
    first: dict[Key, Node] = {}
    for node in graph.nodes:
        if not is_pure(node, ("aten", "torchao")):
            continue
        known = first.setdefault((node.target, _key(node.args), _key(node.kwargs)), node)
        if known is not node and node not in results:
            node.replace_all_uses_with(known)
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program


def _key(value: object) -> object:
    """Equal for the same node, and for literals of the same type and value."""
    if isinstance(value, (list, tuple)):
        return tuple(_key(each) for each in value)
    if isinstance(value, dict):
        return tuple((name, _key(each)) for name, each in value.items())
    return value if isinstance(value, Node) else (type(value), repr(value))
