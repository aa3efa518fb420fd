"""Query heads that share keys are attended together for one token, with the same result."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from executorch.exir import EdgeCompileConfig, EdgeProgramManager, ExecutorchBackendConfig, to_edge
from executorch.exir.passes.sym_shape_eval_pass import ConstraintBasedSymShapeEvalPass
from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401  # registers llama::custom_sdpa
from torch import nn
from torch.export import Dim

from pipeline.passes.heads_together import heads_together
from runners.runtime import portable_lib

KEYS, WIDTH, LENGTH = 2, 8, 16  # K, D, N
pytestmark = pytest.mark.export


class Full(nn.Module):
    """Attention up to a position. query [K, S, G, D], keys and values [K, N, 1, D]."""

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        start = position.item()
        torch._check(start >= 0)
        torch._check(start < LENGTH)
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
        settings = ExecutorchBackendConfig(sym_shape_eval_pass=ConstraintBasedSymShapeEvalPass())
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


def edge(module: nn.Module, example: tuple[torch.Tensor, ...], dynamic: bool = True) -> EdgeProgramManager:
    tokens = Dim("tokens", min=1, max=LENGTH)
    shapes = ({1: tokens}, None, None, {0: tokens} if example[3].dim() == 2 else None) if dynamic else None
    program = torch.export.export(module, example, dynamic_shapes=shapes, strict=False).run_decompositions({})
    return to_edge(program, compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True))


def together(module: nn.Module, example: tuple[torch.Tensor, ...], dynamic: bool = True) -> EdgeProgramManager:
    manager = edge(module, example, dynamic)
    heads_together(manager.exported_program())
    return manager


def operators(manager: EdgeProgramManager) -> Counter[str]:
    nodes = manager.exported_program().graph_module.graph.nodes
    return Counter(str(node.target) for node in nodes if node.op == "call_function")


def at(example: tuple[torch.Tensor, ...], position: int) -> tuple[torch.Tensor, ...]:
    return (*example[:3], torch.tensor([position]))


@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_one_token_at_any_position(heads: int, scale: float | None) -> None:
    module = Full(scale)
    program = Loaded(together(module, inputs(3, heads)))
    for position in range(LENGTH):  # from 0 on, where the start that the operator is given is below 0
        given = at(inputs(1, heads), position)
        torch.testing.assert_close(program(*given), module(*given), rtol=1e-5, atol=1e-6)


def test_more_tokens_go_the_way_they_went() -> None:
    module, heads = Full(), 4
    program, before = Loaded(together(module, inputs(3, heads))), Loaded(edge(module, inputs(3, heads)))
    for tokens in (2, 3, 7, 10):
        assert torch.equal(program(*inputs(tokens, heads)), before(*inputs(tokens, heads)))


def test_calls_of_changing_lengths_do_not_disturb_each_other() -> None:
    module, heads = Full(), 4
    program = Loaded(together(module, inputs(3, heads)))
    for tokens, position in ((1, 2), (7, 0), (1, 15), (2, 3), (1, 0)):
        given = at(inputs(tokens, heads), position)
        torch.testing.assert_close(program(*given), module(*given), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_mask_of_a_ring(tokens: int) -> None:
    module = Masked()
    program = Loaded(together(module, inputs(3, 6, masked=True)))
    given = inputs(tokens, 6, masked=True)
    torch.testing.assert_close(program(*given), module(*given), rtol=1e-5, atol=1e-6)


def test_a_method_of_one_token_needs_no_condition() -> None:
    module, given = Full(), inputs(1, 4)
    manager = together(module, given, dynamic=False)
    assert "cond" not in operators(manager)
    torch.testing.assert_close(Loaded(manager)(*given), module(*given), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_result_outlives_the_next_attention(tokens: int) -> None:
    module, given = Two(), inputs(tokens, 4)
    program = Loaded(together(module, inputs(3, 4)))
    torch.testing.assert_close(program(*given), module(*given), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("heads", "tokens", "dynamic"), [(KEYS, 3, True), (KEYS, 1, False), (4, 3, False)])
def test_where_there_is_nothing_to_share_nothing_changes(heads: int, tokens: int, dynamic: bool) -> None:
    example = inputs(tokens, heads)
    assert operators(together(Full(), example, dynamic)) == operators(edge(Full(), example, dynamic))
