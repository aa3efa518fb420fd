"""Compute the logits of a call's last token alone, of a model whose forward has no argument for it.

S tokens of a call, V vocabulary. The last token's hidden state is taken before the output layer instead of its logits
after it: what lies between treats each token by itself. Logits of every token of a call as long as the cache would be
most of the program's memory.
"""

from __future__ import annotations

import operator
import sys

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import Node
from torch.fx.node import map_arg

from runners.errors import UserError

_ATEN = torch.ops.aten
# Between the output layer and the logits: a scale, a bias a token of the vocabulary, soft caps.
_ELEMENTWISE = {
    _ATEN.add.Tensor,
    _ATEN.mul.Tensor,
    _ATEN.mul.Scalar,
    _ATEN.div.Tensor,
    _ATEN.tanh.default,
    _ATEN.clone.default,
}


def last_logits(program: ExportedProgram) -> ExportedProgram:
    """Make the first output, ``[1, S, V]``, that of the last token alone: ``[1, 1, V]``.

    Raises:
        UserError: the logits are not made by a linear layer from hidden states, as far as can be seen.
    """
    graph = program.graph_module.graph
    kinds = [spec.kind for spec in program.graph_signature.output_specs]
    chain = _chain(graph.output_node().args[0][kinds.index(OutputKind.USER_OUTPUT)])
    hidden, rounding = _hidden(chain[-1].args[0])
    changed = {*chain, *rounding}
    with graph.inserting_after(hidden):
        last = graph.call_function(_ATEN.slice.Tensor, (hidden, 1, -1, sys.maxsize))
    last.meta = {**hidden.meta, "val": hidden.meta["val"][:, -1:]}
    hidden.replace_all_uses_with(last, delete_user_cb=lambda user: user in changed)
    for node in graph.nodes:
        if node in changed:
            arguments = map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
            node.meta["val"] = node.target(*arguments[0], **arguments[1])
    program.graph_module.recompile()
    return program


def _hidden(node: Node) -> tuple[Node, list[Node]]:
    """The hidden states that a linear layer reads, and what rounds them to 8 bits and back before it does."""
    rounding: list[Node] = []
    sources: set[Node] = set()
    pending = [node]
    while pending:
        found = pending.pop()
        if found.target is operator.getitem or getattr(found.target, "namespace", None) == "torchao":
            rounding.append(found)
            pending += found.all_input_nodes
        else:
            sources.add(found)
    if len(sources) != 1:
        raise _unseen(node)
    return sources.pop(), rounding


def _unseen(node: Node) -> UserError:
    return UserError(
        "export.logits: last needs logits that a linear layer makes from each token's hidden state, and here they come "
        f"from {node.target}; set it to all."
    )


def _chain(node: Node) -> list[Node]:
    """The nodes from the logits back to the linear layer that makes them."""
    found = [node]
    while found[-1].target is not _ATEN.linear.default:
        tokens = [x for x in found[-1].all_input_nodes if _rank(x) == 3 and x.meta["val"].shape[1] != 1]
        if found[-1].target not in _ELEMENTWISE or len(tokens) != 1 or len(tokens[0].users) != 1:
            raise _unseen(found[-1])
        found.append(tokens[0])
    return found


def _rank(node: Node) -> int:
    return node.meta["val"].dim() if isinstance(node.meta.get("val"), torch.Tensor) else 0
