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
LONGEST, WIDTH, KERNEL = 64, 8, 5
SHORTEST = KERNEL + 2  # leaves two places: torch takes sizes of one for constants


class Joined(nn.Module):
    """Sizes with factors, sums and no symbol at all: [S, W] -> [2 S + 1, W]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled = torch.cat([x, x * 2.0])
        return torch.cat([doubled, torch.zeros(1, WIDTH)]) * 3.0


class Convolved(nn.Module):
    """Sizes that for a single token would be less than nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, kernel_size=KERNEL, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[S, W] -> [1, W, (S - KERNEL) // 2 + 1]."""
        return torch.relu(self.conv(x[None].transpose(1, 2)))


def exported(module: nn.Module, least: int = 1) -> torch.export.ExportedProgram:
    shapes = ({0: Dim("tokens", min=least, max=LONGEST)},)
    example = (torch.ones(LONGEST // 2, WIDTH),)
    return export(module, example, dynamic_shapes=shapes, strict=False).run_decompositions({})


def sizes(program: torch.export.ExportedProgram) -> dict[str, list[int]]:
    """What is written for each shape of the program."""
    nodes = [node for node in program.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    symbol = next(str(x.meta["val"].shape[0]) for x in nodes if x.name == "x")
    with smallest_first_sizes():
        return {str(tuple(x.meta["val"].shape)).replace(symbol, "S"): node_visitor.get_shape(x) for x in nodes}


def test_each_symbol_is_the_smallest_of_its_range() -> None:
    wanted = {"(S, 8)": [3, 8], "(2*S, 8)": [6, 8], "(2*S + 1, 8)": [7, 8], "(1, 8)": [1, 8]}
    assert wanted.items() <= sizes(exported(Joined(), least=3)).items()


def test_outside_the_scope_the_largest_sizes_are_written() -> None:
    x = next(node for node in exported(Joined()).graph.nodes if node.name == "x")
    sizes(exported(Joined()))
    assert node_visitor.get_shape(x)[0] == LONGEST


def test_a_size_that_one_token_would_not_leave_is_that_of_the_shortest_call() -> None:
    found = sizes(exported(Convolved().eval(), least=SHORTEST))
    assert found["(1, 8, (((S - 5)//2)) + 1)"] == [1, 8, 2]


class Between(nn.Module):
    """A size that is a difference of two numbers: positions [2] -> [end - start, W]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start, end = x[0].item(), x[1].item()
        for number, least in ((start, 4), (end, 2)):
            torch._check(number >= least)
            torch._check(number <= LONGEST)
        torch._check(end - start >= 0)
        return torch.ones(end - start, WIDTH)


def test_a_difference_that_the_smallest_do_not_leave_is_one() -> None:
    program = export(Between(), (torch.tensor([5, 9]),), strict=False)
    with smallest_first_sizes():
        written = [node_visitor.get_shape(node) for node in program.graph.nodes if "ones" in node.name]
    assert written == [[1, WIDTH]]


@pytest.mark.parametrize(("module", "least"), [(Joined(), 1), (Convolved(), SHORTEST)])
def test_a_delegate_grows_and_shrinks_with_its_calls(module: nn.Module, least: int) -> None:
    module.eval().requires_grad_(False)
    manager: EdgeProgramManager = xnnpack.lower({"forward": exported(module, least)}, {})
    program = manager.to_executorch(ExecutorchBackendConfig(sym_shape_eval_pass=UpperBounds())).buffer
    loaded = portable_lib._load_for_executorch_from_buffer(program)
    for tokens in (least, LONGEST, 9, least, 33):
        given = torch.rand(tokens, WIDTH)
        torch.testing.assert_close(loaded.forward((given,))[0], module(given), rtol=1e-5, atol=1e-6)
