"""Reshapes with one dynamic size become views that XNNPACK takes, with equal values."""

from __future__ import annotations

import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from torch import nn
from torch.export import Dim, ExportedProgram

from pipeline.backends.xnnpack import LevelPartitioner
from pipeline.passes.inferred_size import inferred_size


class Heads(nn.Module):
    """What surrounds a rotary embedding: heads are split off, turned, and joined again. x [1, S, 8]."""

    def forward(self, x: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
        heads = (x + 1).view(1, x.shape[1], 2, 4).transpose(1, 2) * cos.unsqueeze(1)
        return heads.transpose(1, 2).reshape(1, x.shape[1], 8) * 2


class Two(nn.Module):
    """A shape with two dynamic sizes, which no view can infer. x [1, S, 8]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.matmul(x, x.transpose(1, 2))
        return scores.unsqueeze(1) + 1


class Whole(nn.Module):
    """Integers stay as they are: XNNPACK has none. x [1, S, 8]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.argmax(-1).unsqueeze(0)


def program(module: nn.Module, *shapes: tuple[int, ...]) -> ExportedProgram:
    inputs = tuple(torch.randn(shape) for shape in shapes)
    tokens = Dim("tokens", min=1, max=16)
    return torch.export.export(
        module.eval(), inputs, dynamic_shapes=tuple({1: tokens} for _ in inputs), strict=False
    ).run_decompositions({})


def targets(found: ExportedProgram) -> list[str]:
    return [node.target.__name__ for node in found.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("length", [1, 3, 16])
def test_values_are_equal(length: int) -> None:
    before, x, cos = Heads(), torch.randn(1, length, 8), torch.randn(1, length, 4)
    after = inferred_size(program(before, (1, 5, 8), (1, 5, 4)))
    assert "unsqueeze.default" not in targets(after)
    assert torch.equal(after.module()(x, cos), before(x, cos))


def test_no_size_of_a_view_is_a_symbol_afterwards() -> None:
    found = inferred_size(program(Heads(), (1, 5, 8), (1, 5, 4)))
    views = [node.args[1] for node in found.graph.nodes if node.target is torch.ops.aten.view.default]
    assert sorted(views) == sorted([[1, -1, 2, 4], [1, 1, -1, 4], [1, -1, 8]])


@pytest.mark.parametrize("module", [Two(), Whole()])
def test_what_cannot_be_inferred_or_is_no_float_stays(module: nn.Module) -> None:
    before = program(module, (1, 5, 8))
    wanted = targets(before)
    assert targets(inferred_size(before)) == wanted


@pytest.mark.export
def test_the_heads_are_one_delegate() -> None:
    def delegates(found: ExportedProgram) -> int:
        edge = to_edge_transform_and_lower(
            found, partitioner=[LevelPartitioner()], compile_config=EdgeCompileConfig(_skip_dim_order=True)
        )
        return sum(node.op == "get_attr" for node in edge.exported_program().graph.nodes)

    assert delegates(inferred_size(program(Heads(), (1, 5, 8), (1, 5, 4)))) == 1
    assert delegates(program(Heads(), (1, 5, 8), (1, 5, 4))) > 1
