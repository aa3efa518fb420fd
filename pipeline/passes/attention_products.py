"""Attention as two matrix products and a softmax of the backend, which computes them with all its threads.

For a prompt they are several times as fast as ``llama::custom_sdpa``, which cuts its products into small ones. They
hold all scores of a call at once, so that they are for a limited number of tokens.

The backend's part is made once for all layers of the same sizes: a program of its own, of one delegate.

Legend: as in ``sdpa_call.py``; here N is the number of entries up to the call's last token.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.dialects._ops import ops as exir_ops
from torch.export import Dim, ExportedProgram, export
from torch.fx import Graph, GraphModule, Node, symbolic_trace

from pipeline.backends.part import LowerPart, Part
from pipeline.passes.sdpa_call import Call, write, write_as, write_number

_aten = exir_ops.edge.aten
_prim = exir_ops.backend.executorch_prim
_FAR = 2.0**30  # by what a score falls with each position that the query must not see

_Shape: TypeAlias = tuple[int, int, int]  # K, G, D


def _attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: torch.Tensor, mask: torch.Tensor, shape: _Shape
) -> torch.Tensor:
    """Attention with a mask.

    Args:
        query: ``[K, S, G, D]``.
        key: ``[K, N, 1, D]``.
        value: ``[K, N, 1, D]``.
        scale: of the scores, ``[1]``.
        mask: ``[G * S, N]``, added to the scores.
        shape: K, G and D.

    Returns:
        ``[K, S, G, D]``.
    """
    heads, groups, width = shape
    rows = (query * scale).transpose(1, 2).contiguous().reshape(heads, -1, width)  # [K, G * S, D]
    keys, values = key.reshape(heads, -1, width), value.reshape(heads, -1, width)
    scores = torch.bmm(rows, keys.transpose(1, 2)) + mask
    out = torch.bmm(torch.softmax(scores, dim=-1), values)
    return out.reshape(heads, groups, -1, width).transpose(1, 2)


def _causal_mask(own: torch.Tensor, seen: torch.Tensor, far: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """The mask ``[G * S, N]`` of queries that see no later entry.

    Args:
        own: positions of the queries, float32 ``[S]``.
        seen: positions of the entries, ``[N]``.
        far: by what a score falls with each position that its query must not see, ``[1]``.
        groups: zeros, ``[G, 1]``.
    """
    rows = (groups + own).reshape(-1, 1)
    return torch.clamp(rows * far - seen * far, max=0.0)  # exact where it is 0


@dataclass(frozen=True)
class _Sizes:
    """What makes two calls the same to the backend."""

    heads: int
    groups: int
    width: int
    tokens: int | None  # None: any, up to ``most_tokens``
    most_tokens: int
    most_seen: int
    masked: bool

    @classmethod
    def of(cls, call: Call, most_tokens: int) -> _Sizes:
        tokens = call.tokens if isinstance(call.tokens, int) else None
        masked = call.mask is not None
        return cls(call.heads, call.groups, call.width, tokens, most_tokens, call.most_seen, masked)

    def program(self) -> ExportedProgram:
        """The products as a program of their own."""
        tokens, seen = self.tokens or min(3, self.most_tokens), min(7, self.most_seen)
        s = None if self.tokens else Dim("tokens", min=1, max=self.most_tokens)
        n = Dim("seen", min=1, max=self.most_seen)
        stored = (torch.zeros(self.heads, seen, 1, self.width), {1: n})
        inputs = {
            "query": (torch.zeros(self.heads, tokens, self.groups, self.width), {1: s} if s else None),
            "key": stored,
            "value": stored,
            "scale": (torch.zeros(1), None),
        }
        if self.masked:
            inputs["mask"] = (torch.zeros(self.groups * tokens, seen), {1: n} | ({0: self.groups * s} if s else {}))
        else:
            inputs["own"] = (torch.zeros(tokens), {0: s} if s else None)
            inputs["seen"] = (torch.zeros(seen), {0: n})
            inputs["far"] = (torch.zeros(1), None)
            inputs["groups"] = (torch.zeros(self.groups, 1), None)
        shape = (self.heads, self.groups, self.width)

        def masked(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: torch.Tensor, mask: torch.Tensor
        ) -> torch.Tensor:
            return _attended(query, key, value, scale, mask, shape)

        def causal(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            scale: torch.Tensor,
            own: torch.Tensor,
            seen: torch.Tensor,
            far: torch.Tensor,
            groups: torch.Tensor,
        ) -> torch.Tensor:
            return _attended(query, key, value, scale, _causal_mask(own, seen, far, groups), shape)

        return export(
            symbolic_trace(masked if self.masked else causal),
            (),
            {name: example.clone() for name, (example, _) in inputs.items()},
            dynamic_shapes={name: shape for name, (_, shape) in inputs.items()},
            strict=False,
        ).run_decompositions({})


class Products:
    """Writes attention by products; of each size the backend's part is made once."""

    def __init__(self, lower_part: LowerPart) -> None:
        self._lower_part = lower_part
        self._parts: dict[_Sizes, Part | None] = {}

    def take(self, call: Call, most_tokens: int) -> bool:
        """Whether the backend takes a call of up to ``most_tokens`` whole."""
        return self._part(_Sizes.of(call, most_tokens)) is not None

    def write(self, module: GraphModule, call: Call, tokens: Node | int, most_tokens: int) -> Node:
        """Write attention ``[K, S, G, D]`` into the graph of ``module``, which is where the call's nodes are."""
        graph = call.query.graph
        part = self._part(_Sizes.of(call, most_tokens))
        assert part is not None
        name = f"attention_{len(list(module.children()))}"
        module.add_module(name, part.module)
        scale = call.width**-0.5 if call.scale is None else call.scale
        given = {"query": call.query, "scale": _full(graph, [1], scale)}
        given |= _up_to_here(call, tokens) if call.mask is None else _with_mask(call, call.mask)
        inputs = [given[each] for each in part.inputs]
        delegate = graph.call_function(executorch_call_delegate, (graph.get_attr(name), *inputs))
        delegate.meta["val"] = [torch.empty_like(call.query.meta["val"])]
        return write_as(graph, delegate.meta["val"][0], operator.getitem, delegate, 0)

    def _part(self, sizes: _Sizes) -> Part | None:
        if sizes not in self._parts:
            self._parts[sizes] = self._lower_part(sizes.program())
        return self._parts[sizes]


def _up_to_here(call: Call, tokens: Node | int) -> dict[str, Node]:
    """Keys and values up to the call's last token, and the positions of both."""
    graph, longest = call.query.graph, call.most_seen
    end = write_number(graph, _prim.add.Scalar, operator.add, call.start, tokens)
    n = end.meta["val"]
    torch._check(n <= longest)
    seen = write_as(graph, torch.empty(n), _aten.arange.start_step, 0, end, dtype=torch.float32)
    own = write_as(graph, torch.empty(call.tokens), _aten.slice_copy.Tensor, seen, 0, call.start, end)
    key, value = (
        write_as(graph, torch.empty(call.heads, n, 1, call.width), _aten.slice_copy.Tensor, each, 1, 0, end)
        for each in (call.key, call.value)
    )
    far, groups = _full(graph, [1], _FAR), _full(graph, [call.groups, 1], 0.0)
    return {"key": key, "value": value, "own": own, "seen": seen, "far": far, "groups": groups}


def _with_mask(call: Call, mask: Node) -> dict[str, Node]:
    """Keys and values, and the mask once for each query head of a key head."""
    rows = write(call.query.graph, _aten.cat.default, [mask] * call.groups) if call.groups > 1 else mask
    return {"key": call.key, "value": call.value, "mask": rows}


def _full(graph: Graph, shape: list[int], value: float) -> Node:
    return write(graph, _aten.full.default, shape, value)
