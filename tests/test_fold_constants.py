"""What depends on no input is computed when a program is made; the program says the same."""

from __future__ import annotations

import torch
from torch import nn

from pipeline.passes.fold_constants import fold_constants

ATEN = torch.ops.aten


class Buckets(nn.Module):
    """Adds to an input what a table has at places that are computed from sizes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3)
        self.table.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.bucketize(torch.arange(x.shape[0]) / x.shape[0], torch.arange(0.25, 1.0, 0.25), right=True)
        return x + self.table(places)


class Plain(nn.Module):
    """Adds ones, and noise: there is nothing to compute before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(4, 3) + torch.rand(4, 3)


def program(module: nn.Module, example: torch.Tensor) -> torch.export.ExportedProgram:
    return torch.export.export(module.eval(), (example,), strict=False).run_decompositions({})


def operators(program: torch.export.ExportedProgram) -> set[object]:
    return {node.target for node in program.graph.nodes if node.op == "call_function"}


def test_a_chain_of_numbers_becomes_one_constant() -> None:
    module, x = Buckets(), torch.randn(4, 3)
    found = program(module, x)
    assert ATEN.bucketize.Tensor in operators(found)
    fold_constants(found)
    assert operators(found) == {ATEN.embedding.default, ATEN.add.Tensor}
    assert torch.equal(found.module()(x), module(x))


def test_weights_are_no_constants() -> None:
    found = program(Buckets(), torch.randn(4, 3))
    fold_constants(found)
    folded = [name for name in found.state_dict if name.startswith("folded")]
    assert len(folded) == 1 and found.state_dict[folded[0]].dtype == torch.int64


def test_what_one_operator_makes_and_what_is_drawn_stay() -> None:
    found = program(Plain(), torch.randn(4, 3))
    before = operators(found)
    fold_constants(found)
    assert operators(found) == before and not found.state_dict
