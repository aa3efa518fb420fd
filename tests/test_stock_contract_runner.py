"""The verdict against the stock runner itself, on a program whose every token depends on its whole cache.

V vocabulary, L cache length. The next token is the sum of all tokens in the cache, folded into the letters: a runner
that loses the cache between two calls writes other letters.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from runners.pte import read_program
from runners.stock_contract import stock_runner_verdict
from tests import tiny
from tests.stock import stock_texts

pytestmark = pytest.mark.export

V, L = 300, 32
STEPS = 6
PROMPT = "ab"


class Sum(nn.Module):
    """Next token: first letter + (sum of the cache modulo the number of letters)."""

    def __init__(self, first: int, letters: int) -> None:
        super().__init__()
        self.first, self.letters = first, letters
        self.register_buffer("cache", torch.zeros(L))
        self.register_buffer("vocabulary", torch.arange(V, dtype=torch.float32))

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        n = tokens.shape[1]
        self.cache.index_copy_(0, position + torch.arange(n), tokens[0].float())
        seen = (torch.arange(L) < position + n).float()
        following = torch.remainder((self.cache * seen).sum(), self.letters) + self.first
        return -(self.vocabulary - following).abs().reshape(1, 1, V)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    fast = tiny.tokenizer(V).backend_tokenizer
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    fast.save(str(path))
    return fast, path


def lowered(methods: dict[str, int], model: nn.Module) -> bytes:
    """The model as a program; method name -> most tokens a call."""
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge
    from executorch.exir.passes import MemoryPlanningPass
    from executorch.exir.passes.sym_shape_eval_pass import ConstraintBasedSymShapeEvalPass

    def exported(longest: int) -> torch.export.ExportedProgram:
        free = {1: torch.export.Dim("n", min=1, max=longest)} if longest > 1 else None
        inputs = (torch.zeros(1, min(longest, 3), dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
        return torch.export.export(model, inputs, dynamic_shapes=(free, None))

    constants = {"get_max_seq_len": L, "enable_dynamic_shape": True, "use_kv_cache": True, "get_eos_ids": [0]}
    edge = to_edge(
        {name: exported(longest) for name, longest in methods.items()},
        constant_methods=constants,
        compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
    )
    plan = MemoryPlanningPass(alloc_graph_input=False, share_mutable_buffers=True)
    shapes = ConstraintBasedSymShapeEvalPass()
    config = ExecutorchBackendConfig(sym_shape_eval_pass=shapes, memory_planning_pass=plan)
    return edge.to_executorch(config).buffer


def expected_text(fast, first: int, letters: int) -> str:
    tokens = fast.encode(PROMPT).ids
    answer: list[int] = []
    for _ in range(STEPS):
        answer.append(first + sum(tokens + answer) % letters)
    return fast.decode(answer)


@pytest.mark.parametrize("methods", [("forward",), ("forward", "decode"), ("forward", "verify")])
def test_the_verdict_is_the_stock_runner_s(methods: tuple[str, ...], tokenizer, tmp_path: Path) -> None:
    fast, tokenizer_path = tokenizer
    first, letters = fast.encode("a").ids[0], 26
    path = tmp_path / "model.pte"
    path.write_bytes(lowered({name: L - 1 if name == "forward" else 1 for name in methods}, Sum(first, letters)))
    verdict = stock_runner_verdict(read_program(path), fast.get_vocab_size())
    right = stock_texts(path, tokenizer_path, [PROMPT], STEPS, tmp_path) == [expected_text(fast, first, letters)]
    assert verdict.loads == right
    assert right == ("decode" not in methods)
