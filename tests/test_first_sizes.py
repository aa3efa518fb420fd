"""Delegates are written with their smallest sizes, and run at every size."""

from __future__ import annotations

import pytest
import torch
from executorch.backends.xnnpack.operators import node_visitor
from executorch.exir import EdgeProgramManager, ExecutorchBackendConfig
from torch import nn
from torch.export import Dim, export

from pipeline.backends import xnnpack
from pipeline.backends.first_sizes import smallest_first_sizes
from pipeline.passes.upper_bounds import UpperBounds
from runners.runtime import portable_lib

pytestmark = pytest.mark.export
LONGEST, WIDTH = 64, 8


class Joined(nn.Module):
    """Sizes with factors, sums and no symbol at all: [S, W] -> [2 S + 1, W]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled = torch.cat([x, x * 2.0])
        return torch.cat([doubled, torch.zeros(1, WIDTH)]) * 3.0


def exported() -> torch.export.ExportedProgram:
    shapes = ({0: Dim("tokens", min=1, max=LONGEST)},)
    program = export(Joined(), (torch.ones(5, WIDTH),), dynamic_shapes=shapes, strict=False)
    return program.run_decompositions({})


def test_each_symbol_counts_as_one() -> None:
    nodes = [node for node in exported().graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    of = {tuple(map(str, node.meta["val"].shape)): node for node in nodes}
    symbol = next(str(node.meta["val"].shape[0]) for node in nodes if node.op == "placeholder" and node.name == "x")
    wanted = {(symbol, "8"): [1, 8], (f"2*{symbol}", "8"): [2, 8], (f"2*{symbol} + 1", "8"): [3, 8], ("1", "8"): [1, 8]}
    assert set(wanted) <= set(of)
    with smallest_first_sizes():
        assert {shape: node_visitor.get_shape(of[shape]) for shape in wanted} == wanted
    assert node_visitor.get_shape(of[symbol, "8"])[0] >= LONGEST - 1  # as it was


def test_a_delegate_grows_and_shrinks_with_its_calls() -> None:
    manager: EdgeProgramManager = xnnpack.lower({"forward": exported()}, {})
    program = manager.to_executorch(ExecutorchBackendConfig(sym_shape_eval_pass=UpperBounds())).buffer
    loaded, module = portable_lib._load_for_executorch_from_buffer(program), Joined()
    for tokens in (1, LONGEST, 7, 1, 33):
        given = torch.rand(tokens, WIDTH)
        assert torch.equal(loaded.forward((given,))[0], module(given))
