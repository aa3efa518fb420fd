"""Calls of ``llama::custom_sdpa`` in an edge program, and how the passes on them write nodes.

Legend: S tokens of a call, K key heads, each a sequence to the operator, G query heads of each, D head width, N entries
seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from executorch.exir.dialects._ops import ops as exir_ops
from executorch.exir.sym_util import eval_upper_bound
from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401  # registers llama::custom_sdpa
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Graph, Node

SDPA = exir_ops.edge.llama.custom_sdpa.default
_ARGUMENTS = ("query", "key", "value", "start_pos", "attn_mask", "dropout_p", "is_causal", "scale")

Target: TypeAlias = Callable[..., object]


@dataclass(frozen=True)
class Call:
    """What a call of the operator takes, in the graph of the program or of one side of a condition."""

    query: Node  # [K, S, G, D]
    key: Node  # [K, N, 1, D]
    value: Node  # [K, N, 1, D]
    start: Node | int
    mask: Node | None  # [S, N], and then the operator is not causal
    scale: float | None

    @classmethod
    def of(cls, node: Node) -> Call | None:
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
    def most_tokens(self) -> int:
        """S at most."""
        return int(eval_upper_bound(self.tokens))

    @property
    def heads(self) -> int:
        """K."""
        return int(self.query.meta["val"].shape[0])

    @property
    def groups(self) -> int:
        """G."""
        return int(self.query.meta["val"].shape[2])

    @property
    def width(self) -> int:
        """D."""
        return int(self.query.meta["val"].shape[3])

    @property
    def most_seen(self) -> int:
        """N at most."""
        return int(eval_upper_bound(self.key.meta["val"].shape[1]))

    @property
    def nodes(self) -> list[Node]:
        """Those of its arguments that are not numbers in the program."""
        return [x for x in (self.query, self.key, self.value, self.start, self.mask) if isinstance(x, Node)]

    def at(self, places: dict[Node, Node]) -> Call:
        """The same call where each of its nodes is another."""
        start = places[self.start] if isinstance(self.start, Node) else self.start
        mask = places[self.mask] if self.mask is not None else None
        return replace(
            self,
            query=places[self.query],
            key=places[self.key],
            value=places[self.value],
            start=start,
            mask=mask,
        )


def as_it_is(call: Call) -> Node:
    """Write the call itself: attention ``[K, S, G, D]``."""
    masks = (call.start, call.mask, 0.0, call.mask is None, call.scale)
    return write(call.query.graph, SDPA, call.query, call.key, call.value, *masks)


def write(graph: Graph, target: Target, *args: object) -> Node:
    """Write a call of an operator on tensors; its value is computed."""
    node = graph.call_function(target, args)
    node.meta["val"] = target(*torch.fx.node.map_arg(args, lambda each: each.meta["val"]))
    return node


def write_number(graph: Graph, target: Target, compute: Target, a: Node | int, b: Node | int) -> Node:
    """Write a runtime's own arithmetic on two numbers, which ``compute`` does in Python."""
    node = graph.call_function(target, (a, b))
    values = [x.meta["val"] if isinstance(x, Node) else x for x in (a, b)]
    node.meta["val"] = compute(*values)
    return node


def write_as(graph: Graph, value: torch.Tensor, target: Target, *args: object, **kwargs: object) -> Node:
    """Write a call of an operator whose result is known to look like ``value``."""
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = value
    return node


@contextmanager
def fake(node: Node) -> Iterator[None]:
    """Within the scope operators on a program's values compute shapes alone."""
    with node.meta["val"].fake_mode, enable_python_dispatcher():
        yield
