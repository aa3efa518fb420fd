"""Let one input of a program serve where the model has two arguments that always hold the same."""

from __future__ import annotations

from collections.abc import Mapping

from torch.export import ExportedProgram


def one_input(program: ExportedProgram, same_as: Mapping[str, str]) -> None:
    """Make the program read one placeholder in the place of another, in place.

    Args:
        program: not yet placed by ``lift_cache``, which drops the placeholders that are left without a reader.
        same_as: placeholder -> the placeholder that is read in its place; both have one shape and dtype.
    """
    nodes = {node.name: node for node in program.graph_module.graph.nodes if node.op == "placeholder"}
    for name, other in same_as.items():
        mine, theirs = nodes[name].meta["val"], nodes[other].meta["val"]
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), f"{name} is not as {other}"
        nodes[name].replace_all_uses_with(nodes[other])
    program.graph_module.recompile()
