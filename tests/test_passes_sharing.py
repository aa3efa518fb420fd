"""What a program computes again is computed once; what it puts beside itself is a product."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from torch import nn
from torch.export import Dim, ExportedProgram

from pipeline.backends.xnnpack import LevelPartitioner
from pipeline.passes.computed_once import computed_once
from pipeline.passes.doubled_as_linear import doubled_as_linear
from tests.test_passes import Applied, exported, operators

pytestmark = pytest.mark.export
Function = Callable[[torch.Tensor], torch.Tensor]
UNSQUEEZE, CAT, LINEAR = "aten.unsqueeze.default", "aten.cat.default", "aten.linear.default"


def test_a_value_that_each_layer_makes_anew_is_made_once() -> None:
    def layers(x: torch.Tensor) -> torch.Tensor:
        table = x.cos()
        for _ in range(5):
            x = x * table.unsqueeze(0)[0] + table.unsqueeze(0)[0]
        return x

    x = torch.randn(3, 4)
    program = exported(Applied(layers), x)
    assert operators(program)[UNSQUEEZE] == 10
    program = computed_once(program)
    assert operators(program)[UNSQUEEZE] == 1
    assert torch.equal(program.module()(x), layers(x))


DIFFERENT: dict[str, Function] = {
    "another argument": lambda x: x.unsqueeze(0) + x.unsqueeze(1),
    "an argument of another type": lambda x: torch.mul(x, 1) + torch.mul(x, 1.0),
    "another source": lambda x: x.exp().exp() + x.cos().exp(),
    "another keyword": lambda x: torch.add(x, x, alpha=2) + torch.add(x, x, alpha=3),
    "zeros of two signs": lambda x: torch.mul(x, 0.0) + torch.mul(x, -0.0),
    "chance": lambda x: torch.rand_like(x) + torch.rand_like(x),
}


@pytest.mark.parametrize("function", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_different_values_stay_apart(function: Function) -> None:
    program = exported(Applied(function), torch.randn(3, 3))
    before = operators(program)
    assert operators(computed_once(program)) == before


class Twice(nn.Module):
    """Returns one value twice."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, x + 1


def test_outputs_keep_their_names() -> None:
    program = exported(Twice(), torch.randn(3))
    names = [spec.arg.name for spec in program.graph_signature.output_specs]
    program = computed_once(program)
    assert [node.name for node in program.graph.output_node().args[0]] == names
    assert all(torch.equal(found, torch.ones(3)) for found in program.module()(torch.zeros(3)))


def beside_itself(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x, x), -1)


@pytest.mark.parametrize("width", [1, 3, 32, 256])
def test_a_tensor_beside_itself_is_a_product_of_the_same_value(width: int) -> None:
    x = torch.randn(2, 5, width) * 1000
    program = doubled_as_linear(exported(Applied(beside_itself), x))
    found = operators(program)
    assert (found[CAT], found[LINEAR]) == (0, 1)
    assert torch.equal(program.module()(x), beside_itself(x))


OTHERS: dict[str, Function] = {
    "two tensors": lambda x: torch.cat((x, x + 1), -1),
    "another axis": lambda x: torch.cat((x, x), 1),
    "three times": lambda x: torch.cat((x, x, x), -1),
    "another type": lambda x: beside_itself(x.double()),
    "a wide one": lambda x: beside_itself(x.repeat(1, 1, 65)),  # 260
}


@pytest.mark.parametrize("function", OTHERS.values(), ids=OTHERS.keys())
def test_other_concatenations_stay(function: Function) -> None:
    program = exported(Applied(function), torch.randn(1, 2, 4))
    before = operators(program)
    program = doubled_as_linear(program)
    assert program.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default) == []
    assert operators(program)[CAT] == before[CAT] > 0


class Rotated(nn.Module):
    """A projection, turned by tables that are made of the positions. x [1, S, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        both = torch.cat((angles, angles), -1)
        return self.projection(x) * both.cos() + both.sin()


def delegates(program: ExportedProgram) -> int:
    edge = to_edge_transform_and_lower(
        program, partitioner=[LevelPartitioner()], compile_config=EdgeCompileConfig(_skip_dim_order=True)
    )
    return sum(node.op == "get_attr" for node in edge.exported_program().graph.nodes)


def test_the_rotary_tables_need_no_delegate_of_their_own() -> None:
    tokens = Dim("tokens", min=1, max=16)
    inputs = (torch.randn(1, 5, 8), torch.randn(1, 5, 4).exp())

    def program() -> ExportedProgram:
        shapes = ({1: tokens}, {1: tokens})
        return torch.export.export(Rotated(), inputs, dynamic_shapes=shapes, strict=False).run_decompositions({})

    assert delegates(doubled_as_linear(program())) == 1
    assert "cat" in str(program().graph), "the model concatenates, or there is nothing to test"
