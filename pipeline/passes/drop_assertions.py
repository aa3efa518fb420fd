"""Drop the assertions that export writes into a program.

Those of the dtype at each cast say what the program's types say already. Those of a scalar bound the position too low:
torch takes a dynamic length for 2 or more, so that the last position of the cache would be refused to a single token.
The operators check the position themselves, and ExecuTorch drops scalar assertions anyway.
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

_ASSERTIONS = (torch.ops.aten._assert_tensor_metadata.default, torch.ops.aten._assert_scalar.default)


def drop_assertions(program: ExportedProgram) -> ExportedProgram:
    """Remove every assertion, and what only assertions read."""
    graph = program.graph_module.graph
    for target in _ASSERTIONS:
        for node in graph.find_nodes(op="call_function", target=target):
            graph.erase_node(node)
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program
