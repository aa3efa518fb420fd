"""Attention of a prompt by products of the backend gives what the operator gives."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from executorch.exir import EdgeCompileConfig, EdgeProgramManager, ExecutorchBackendConfig, to_edge
from executorch.exir.passes.sym_shape_eval_pass import ConstraintBasedSymShapeEvalPass
from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401  # registers llama::custom_sdpa
from torch import nn
from torch.export import Dim, ExportedProgram

from pipeline.backends.part import Part
from pipeline.backends.xnnpack import lower_part
from pipeline.passes.attend_by_length import attend_by_length
from pipeline.passes.upper_bounds import UpperBounds
from runners.runtime import portable_lib

KEYS, WIDTH, LENGTH = 2, 8, 16  # K, D, N
pytestmark = pytest.mark.export


class Full(nn.Module):
    """Attention up to a position. query [K, S, G, D], keys and values [K, N, 1, D]."""

    def __init__(self, scale: float | None = None, length: int = LENGTH) -> None:
        super().__init__()
        self.scale, self.length = scale, length

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        start = position.item()
        torch._check(start >= 0)
        torch._check(start < self.length)
        return torch.ops.llama.custom_sdpa(query, key, value, start, None, 0.0, True, self.scale)


class Masked(nn.Module):
    """Attention to what a mask [S, N] shows, as of a ring."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.ops.llama.custom_sdpa(query, key, value, 0, mask, 0.0, False, None)


class Two(Full):
    """Two attentions, neither of which is read before both are there."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        first = super().forward(query, key, value, position)
        second = super().forward(query, value, key, position)
        return torch.cat((first, second), dim=-1)


class Loaded:
    """A program that runs; it holds the bytes, which the runtime reads from as long as it lives."""

    def __init__(self, manager: EdgeProgramManager) -> None:
        settings = ExecutorchBackendConfig(sym_shape_eval_pass=UpperBounds())
        self._bytes = manager.to_executorch(settings).buffer
        self._program = portable_lib._load_for_executorch_from_buffer(self._bytes)

    def __call__(self, *given: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._program.forward(given)[0].clone()
        return out


def inputs(tokens: int, heads: int, masked: bool = False) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    query = torch.randn(KEYS, tokens, heads // KEYS, WIDTH, generator=generator)
    key, value = torch.randn(2, KEYS, LENGTH, 1, WIDTH, generator=generator).unbind()
    if not masked:
        return query, key, value, torch.tensor([5])
    seen = torch.rand(tokens, LENGTH, generator=generator) < 0.5
    seen[:, 0] = True
    return query, key, value, torch.where(seen, 0.0, -1e9)


def edge(
    module: nn.Module, example: tuple[torch.Tensor, ...], dynamic: bool = True, most: int = LENGTH
) -> EdgeProgramManager:
    tokens = Dim("tokens", min=1, max=most)
    shapes = ({1: tokens}, None, None, {0: tokens} if example[3].dim() == 2 else None) if dynamic else None
    program = torch.export.export(module, example, dynamic_shapes=shapes, strict=False).run_decompositions({})
    return to_edge(program, compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True))


def rewritten(
    module: nn.Module, example: tuple[torch.Tensor, ...], dynamic: bool = True, most: int = LENGTH
) -> EdgeProgramManager:
    manager = edge(module, example, dynamic, most)
    attend_by_length(manager.exported_program(), lower_part)
    return manager


def operators(manager: EdgeProgramManager) -> Counter[str]:
    nodes = manager.exported_program().graph_module.graph.nodes
    return Counter(str(node.target) for node in nodes if node.op == "call_function")


def at(example: tuple[torch.Tensor, ...], position: int) -> tuple[torch.Tensor, ...]:
    return (*example[:3], torch.tensor([position]))


def cut(example: tuple[torch.Tensor, ...], length: int) -> tuple[torch.Tensor, ...]:
    """The same over a shorter cache."""
    query, key, value, position = example
    return query, key[:, :length].contiguous(), value[:, :length].contiguous(), position


@pytest.fixture
def few_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products for up to 5 tokens of 4 heads."""
    monkeypatch.setattr("pipeline.passes.attend_by_length._MOST_SCORES", 5 * 4 * LENGTH)


@pytest.mark.parametrize("heads", [KEYS, 4, 6])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_any_number_of_tokens_at_any_position(heads: int, scale: float | None) -> None:
    module = Full(scale)
    program = Loaded(rewritten(module, inputs(3, heads)))
    for tokens, position in ((1, 0), (1, 15), (2, 0), (2, 14), (3, 5), (16, 0), (7, 9), (1, 3)):
        given = at(inputs(tokens, heads), position)
        torch.testing.assert_close(program(*given), module(*given), rtol=1e-5, atol=1e-6)


def test_one_token_is_left_to_the_operator_and_a_prompt_is_not() -> None:
    module, heads = Full(), 4
    program, before = Loaded(rewritten(module, inputs(3, heads))), Loaded(edge(module, inputs(3, heads)))
    assert torch.equal(program(*inputs(1, heads)), before(*inputs(1, heads)))
    assert not torch.equal(program(*inputs(7, heads)), before(*inputs(7, heads)))  # sums in another order


@pytest.mark.usefixtures("few_scores")
def test_more_tokens_than_the_limit_are_left_to_the_operator() -> None:
    module, heads = Full(), 4
    program, before = Loaded(rewritten(module, inputs(3, heads))), Loaded(edge(module, inputs(3, heads)))
    for tokens in (1, 6, 10):
        assert torch.equal(program(*inputs(tokens, heads)), before(*inputs(tokens, heads)))
    for tokens in (2, 5):
        given = inputs(tokens, heads)
        torch.testing.assert_close(program(*given), module(*given), rtol=1e-5, atol=1e-6)
    assert not torch.equal(program(*inputs(5, heads)), before(*inputs(5, heads)))


@pytest.mark.usefixtures("few_scores")
@pytest.mark.parametrize(("tokens", "is_rewritten"), [(5, True), (6, False)])
def test_a_method_of_a_fixed_number_of_tokens_has_no_condition(tokens: int, is_rewritten: bool) -> None:
    module, given = Full(), inputs(tokens, 4)
    manager = rewritten(module, given, dynamic=False)
    found = operators(manager)
    assert "cond" not in found
    assert any("custom_sdpa" in name for name in found) is not is_rewritten
    torch.testing.assert_close(Loaded(manager)(*given), module(*given), rtol=1e-5, atol=1e-6)


def test_a_far_entry_has_no_weight_at_all() -> None:
    module, (query, key, value, _) = Full(), inputs(3, 4)
    program = Loaded(rewritten(module, inputs(3, 4)))
    position = torch.tensor([2])
    before = program(query, key, value, position)
    key[:, 5:], value[:, 5:] = 50.0, 1e30  # what lies beyond the call's last token, as an earlier sequence left it
    assert torch.equal(program(query, key, value, position), before)
    key[:, 4], value[:, 4] = 50.0, 1e30  # the last token: the two before it must not see it
    assert torch.equal(program(query, key, value, position)[:, :2], before[:, :2])


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_mask_of_a_ring(tokens: int) -> None:
    module = Masked()
    program = Loaded(rewritten(module, inputs(3, 6, masked=True)))
    given = inputs(tokens, 6, masked=True)
    torch.testing.assert_close(program(*given), module(*given), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_result_outlives_the_next_attention(tokens: int) -> None:
    module, given = Two(), inputs(tokens, 4)
    program = Loaded(rewritten(module, inputs(3, 4)))
    torch.testing.assert_close(program(*given), module(*given), rtol=1e-5, atol=1e-6)


def test_a_method_of_one_token_is_not_changed() -> None:
    example = inputs(1, 4)
    assert operators(rewritten(Full(), example, False)) == operators(edge(Full(), example, False))


def test_a_cache_of_two_entries() -> None:
    module, heads = Full(length=2), 4
    program = Loaded(rewritten(module, cut(inputs(2, heads), 2), most=2))
    for tokens, position in ((2, 0), (1, 0), (1, 1)):
        given = cut(at(inputs(tokens, heads), position), 2)
        torch.testing.assert_close(program(*given), module(*given), rtol=1e-5, atol=1e-6)


def test_layers_of_one_size_share_the_backends_part() -> None:
    parts = []

    def lower_once(program: ExportedProgram) -> Part | None:
        parts.append(lower_part(program))
        return parts[-1]

    attend_by_length(edge(Two(), inputs(3, 4)).exported_program(), lower_once)
    assert len(parts) == 1


def test_where_the_backend_does_not_take_the_products_nothing_changes() -> None:
    manager, before = edge(Full(), inputs(3, 4)), edge(Full(), inputs(3, 4))
    attend_by_length(manager.exported_program(), lambda program: None)
    assert operators(manager) == operators(before)


def test_what_is_cut_from_the_cache_is_planned_no_longer_than_the_cache() -> None:
    planned = []
    for bounds in (ConstraintBasedSymShapeEvalPass(), UpperBounds()):
        manager = rewritten(Full(), inputs(3, 4))
        program = manager.to_executorch(ExecutorchBackendConfig(sym_shape_eval_pass=bounds)).executorch_program
        planned.append(sum(program.execution_plan[0].non_const_buffer_sizes))
    keys_and_values, saved = 2 * KEYS * WIDTH * 4, (LENGTH - 1) + (LENGTH - 1) - LENGTH  # bytes an entry; entries
    assert planned[0] - planned[1] >= keys_and_values * saved


class Cut(nn.Module):
    """What lies in a table [N, D] up to the end of a call, as one row."""

    def forward(self, query: torch.Tensor, table: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        start = position.item()
        torch._check(start >= 0)
        torch._check(start < LENGTH)
        end = start + query.shape[0]
        torch._check(end <= LENGTH)
        return table[:end].reshape(-1) + 1


def test_a_view_of_what_is_cut_has_room() -> None:
    module, table = Cut(), torch.randn(LENGTH, WIDTH)
    example, shapes = (torch.zeros(3), table, torch.tensor([1])), ({0: Dim("tokens", min=1, max=LENGTH)}, None, None)
    exported = torch.export.export(module, example, dynamic_shapes=shapes, strict=False).run_decompositions({})
    config = EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True)
    program = Loaded(to_edge(exported, compile_config=config))
    for tokens, position in ((3, 1), (LENGTH, 0), (2, LENGTH - 2)):
        given = (torch.zeros(tokens), table, torch.tensor([position]))
        assert torch.equal(program(*given), module(*given))
