"""Each graph pass: it fires where it should, leaves other graphs alone, and keeps the values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torchao.quantization import IntxWeightOnlyConfig, quantize_
from torchao.quantization.granularity import Granularity, PerAxis, PerGroup

from pipeline.passes.constants import add_constant
from pipeline.passes.drop_assertions import drop_assertions
from pipeline.passes.half_swap_as_linear import half_swap_as_linear, half_swap_matrix
from pipeline.passes.mean_as_linear import mean_as_linear
from pipeline.passes.quantized_embedding import quantized_embedding
from runners.errors import UserError
from tests import tiny

pytestmark = pytest.mark.export

Function = Callable[[torch.Tensor], torch.Tensor]
LINEAR, MEAN, CAT = "aten.linear.default", "aten.mean.dim", "aten.cat.default"


class Applied(nn.Module):
    """A function as a module."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def exported(module: nn.Module, *inputs: torch.Tensor, dynamic: dict[int, Dim] | None = None) -> ExportedProgram:
    shapes = (dynamic,) if dynamic else None
    if isinstance(module, Applied):
        shapes = {"x": dynamic} if dynamic else None
    program = torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)
    return program.run_decompositions({})


def operators(program: ExportedProgram) -> Counter[str]:
    return Counter(str(node.target) for node in program.graph.nodes if node.op == "call_function")


# A mean over the last axis


@pytest.mark.parametrize("width", [8, 64, 576])
@pytest.mark.parametrize("axis", [-1, 2])
def test_a_mean_over_the_last_axis_becomes_a_product_of_equal_value(width: int, axis: int) -> None:
    x = torch.randn(2, 5, width) * 10
    program = mean_as_linear(exported(Applied(lambda x: x.pow(2).mean(axis, keepdim=True)), x))
    found = operators(program)
    assert (found[MEAN], found[LINEAR]) == (0, 1)
    torch.testing.assert_close(program.module()(x), x.pow(2).mean(-1, keepdim=True))


def test_a_mean_beside_a_dynamic_axis_becomes_a_product() -> None:
    program = exported(Applied(lambda x: x.mean(-1, keepdim=True)), torch.randn(1, 5, 8), dynamic={1: Dim("n", max=20)})
    program = mean_as_linear(program)
    assert operators(program)[MEAN] == 0
    x = torch.randn(1, 11, 8)
    torch.testing.assert_close(program.module()(x), x.mean(-1, keepdim=True))


OTHER_MEANS: dict[str, Function] = {
    "another axis": lambda x: x.mean(1, keepdim=True),
    "two axes": lambda x: x.mean([1, 2], keepdim=True),
    "all axes": lambda x: x.mean(None, keepdim=True),
    "the axis is dropped": lambda x: x.mean(-1),
    "another type": lambda x: x.double().mean(-1, keepdim=True),
    "accumulated in another type": lambda x: x.mean(-1, keepdim=True, dtype=torch.float64),
}


@pytest.mark.parametrize("function", OTHER_MEANS.values(), ids=OTHER_MEANS.keys())
def test_another_mean_is_left_alone(function: Function) -> None:
    program = exported(Applied(function), torch.randn(2, 3, 8))
    before = str(program.graph)
    assert str(mean_as_linear(program).graph) == before


def test_a_mean_over_a_dynamic_axis_is_left_alone() -> None:
    program = exported(Applied(lambda x: x.mean(-1, keepdim=True)), torch.randn(2, 3, 8), dynamic={2: Dim("n", max=9)})
    assert operators(mean_as_linear(program))[MEAN] == 1


# The rotary half-swap


def swap(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)


@pytest.mark.parametrize("width", [2, 16, 64, 128])
def test_a_half_swap_becomes_a_product_of_the_same_value(width: int) -> None:
    x = torch.randn(1, 4, 5, width) * torch.logspace(-30, 30, width)
    program = half_swap_as_linear(exported(Applied(swap), x))
    found = operators(program)
    assert (found[CAT], found["aten.slice.Tensor"], found["aten.neg.default"], found[LINEAR]) == (0, 0, 0, 1)
    assert torch.equal(program.module()(x), swap(x))


def test_half_swaps_of_one_width_share_their_matrix() -> None:
    x = torch.randn(1, 4, 8)
    program = half_swap_as_linear(exported(Applied(lambda x: swap(x) + swap(x + 1)), x))
    assert operators(program)[LINEAR] == 2
    assert [name for name in program.state_dict if "half_swap" in name] == ["half_swap_8"]
    assert torch.equal(program.module()(x), swap(x) + swap(x + 1))


def test_the_matrix_holds_one_number_a_row() -> None:
    matrix = half_swap_matrix(6, torch.float32)
    assert matrix.tolist() == [
        [0, 0, 0, -1, 0, 0],
        [0, 0, 0, 0, -1, 0],
        [0, 0, 0, 0, 0, -1],
        [1, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
    ]


OTHER_CATS: dict[str, Function] = {
    "halves in their places": lambda x: torch.cat([-x[..., :4], x[..., 4:]], -1),
    "the other half negated": lambda x: torch.cat([x[..., 4:], -x[..., :4]], -1),
    "uneven parts": lambda x: torch.cat([-x[..., 3:], x[..., :3]], -1),
    "every second element": lambda x: torch.cat([-x[..., 4:], x[..., :8:2]], -1),
    "a part of each half": lambda x: torch.cat([-x[..., 4:6], x[..., :2]], -1),
    "another axis": lambda x: torch.cat([-x[:, 2:], x[:, :2]], 1),
    "halves joined along another axis": lambda x: torch.cat([-x[..., 4:], x[..., :4]], 1),
    "slices of another axis": lambda x: torch.cat([-x[:, 2:], x[:, :2]], -1),
    "two tensors": lambda x: torch.cat([-(x + 1)[..., 4:], x[..., :4]], -1),
    "three parts": lambda x: torch.cat([-x[..., 4:], x[..., :4], x], -1),
    "no slices": lambda x: torch.cat([-x, x], -1),
    "another type": lambda x: swap(x.double()),
    "odd width": lambda x: swap(x[..., :7]),
    "integers": lambda x: swap(x.to(torch.int64)),
}


@pytest.mark.parametrize("function", OTHER_CATS.values(), ids=OTHER_CATS.keys())
def test_another_concatenation_is_left_alone(function: Function) -> None:
    x = torch.randn(2, 4, 8)
    program = half_swap_as_linear(exported(Applied(function), x))
    assert operators(program)[LINEAR] == 0
    assert torch.equal(program.module()(x), function(x))


# Quantized embedding tables


def table(bits: int, granularity: Granularity, vocabulary: int = 20, width: int = 64) -> nn.Module:
    module = nn.Sequential(nn.Embedding(vocabulary, width)).requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        module[0].weight.normal_()
    config = IntxWeightOnlyConfig(weight_dtype={4: torch.int4, 8: torch.int8}[bits], granularity=granularity)
    quantize_(module, config, lambda module, name: isinstance(module, nn.Embedding))
    return module


IDS = torch.tensor([[0, 7, 19, 7]])


@pytest.mark.parametrize("granularity", [PerAxis(0), PerGroup(32), PerGroup(64)], ids=["row", "group 32", "group 64"])
@pytest.mark.parametrize("bits", [8, 4])
def test_rows_read_from_a_quantized_table_are_those_of_torchao(bits: int, granularity: Granularity) -> None:
    module = table(bits, granularity)
    expected = module(IDS)
    program = quantized_embedding(exported(module, IDS))
    found = operators(program)
    operator = {8: "quantized_decomposed.embedding_byte.default", 4: "quantized_decomposed.embedding_4bit.default"}
    assert found == {operator[bits]: 1}
    assert torch.equal(program.module()(IDS), expected)


def test_a_table_of_floats_is_left_alone() -> None:
    module = nn.Sequential(nn.Embedding(20, 8)).requires_grad_(False)
    program = exported(module, IDS)
    assert operators(quantized_embedding(program)) == {"aten.embedding.default": 1}
    assert torch.equal(program.module()(IDS), module(IDS))


def test_zero_points_and_other_ranges_are_refused_by_name() -> None:
    module = table(8, PerAxis(0))
    module[0].weight.zero_point.fill_(1)
    with pytest.raises(UserError, match=r"quantize\.embedding: p_0_.* -128…127, or has zero points"):
        quantized_embedding(exported(module, IDS))
    config = IntxWeightOnlyConfig(weight_dtype=torch.int2, granularity=PerAxis(0))
    module = nn.Sequential(nn.Embedding(20, 64)).requires_grad_(False)
    quantize_(module, config, lambda module, name: isinstance(module, nn.Embedding))
    with pytest.raises(UserError, match=r"quantized to -2…1"):
        quantized_embedding(exported(module, IDS))


# The rest


def test_assertions_are_dropped_and_nothing_else() -> None:
    x = torch.randn(3)
    program = exported(Applied(lambda x: x.double() + 1), x)
    before = operators(program)
    assert before["aten._assert_tensor_metadata.default"] == 1
    after = operators(drop_assertions(program))
    assert before - after == {"aten._assert_tensor_metadata.default": 1}
    assert torch.equal(program.module()(x), x.double() + 1)


def test_a_constant_is_added_once_a_name() -> None:
    program = exported(Applied(lambda x: x + 1), torch.randn(3))
    first = add_constant(program, "ones", torch.ones(3))
    assert add_constant(program, "ones", torch.ones(3)) is first
    assert [spec.target for spec in program.graph_signature.input_specs if spec.target] == ["ones"]


def test_every_pass_fires_on_a_model_and_keeps_its_logits() -> None:
    shape = tiny.Shape(layers=2)
    model = tiny.llama(shape)
    ids = torch.tensor([[5, 6, 7, 8]])
    program = torch.export.export(model, (), {"input_ids": ids, "use_cache": False}, strict=False)
    program = drop_assertions(program.run_decompositions({}))
    norms, rotated = 2 * shape.layers + 1, 2 * shape.layers
    before = operators(program)
    assert before[MEAN] == norms
    after = operators(half_swap_as_linear(mean_as_linear(program)))
    assert after[MEAN] == 0
    assert before[CAT] - after[CAT] == rotated
    assert after[LINEAR] - before[LINEAR] == norms + rotated
    logits = program.module()(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(logits, model(input_ids=ids).logits)
