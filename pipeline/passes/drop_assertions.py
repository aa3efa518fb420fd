"""Drop the dtype assertions that export writes at each cast.

The program is typed already, and each one slows every later pass.
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram


def drop_assertions(program: ExportedProgram) -> ExportedProgram:
    """Remove every ``_assert_tensor_metadata`` node."""
    graph = program.graph_module.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        graph.erase_node(node)
    program.graph_module.recompile()
    return program
