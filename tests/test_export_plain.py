"""Plain ``torch.export`` of a model with its cache, in a script of one's own: only the cache classes are ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.export import Dim, ExportedProgram
from transformers import DynamicCache, LlamaForCausalLM, StaticCache
from transformers.cache_utils import Cache

from pipeline.caches import empty_dynamic_cache, registered
from tests import tiny

pytestmark = pytest.mark.export

STEPS = 8
PROMPT = torch.tensor([[5, 6, 7, 8, 9]])


def empty_static(model: LlamaForCausalLM) -> StaticCache:
    cache = StaticCache(config=model.config, max_cache_len=32)
    cache.early_initialization(1, 2, 16, torch.float32, torch.device("cpu"))
    return cache


def filled_dynamic(model: LlamaForCausalLM) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    model(input_ids=PROMPT[:, :3], cache=cache)
    return cache


def export_static(model: LlamaForCausalLM, strict: bool) -> ExportedProgram:
    shapes = {"input_ids": {1: Dim("tokens", min=1, max=31)}, "cache": [None] * 6}
    arguments = {"input_ids": PROMPT, "cache": empty_static(model)}
    return torch.export.export(model, (), arguments, dynamic_shapes=shapes, strict=strict)


def export_dynamic(model: LlamaForCausalLM, strict: bool) -> ExportedProgram:
    """The cache's length is dynamic too."""
    shapes = {"input_ids": {1: Dim.AUTO}, "cache": [{2: Dim.AUTO}] * 4}
    arguments = {"input_ids": PROMPT, "cache": filled_dynamic(model)}
    return torch.export.export(model, (), arguments, dynamic_shapes=shapes, strict=strict)


def decoded(program: ExportedProgram, cache: Cache) -> list[int]:
    """Greedy tokens; every call gets the cache that the last one returned."""
    module, ids, tokens = program.module(), PROMPT, []
    for _ in range(STEPS):
        output = module(input_ids=ids, cache=cache)
        cache, ids = output.cache, output.logits[:, -1:].argmax(-1)
        tokens.append(int(ids))
    return tokens


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny.llama()


@pytest.fixture(scope="module")
def eager(model: LlamaForCausalLM) -> list[int]:
    generated = model.generate(PROMPT, max_new_tokens=STEPS, do_sample=False, eos_token_id=None)
    return generated[0, PROMPT.shape[1] :].tolist()


CASES = {
    "static": (export_static, empty_static),
    "dynamic": (export_dynamic, lambda model: empty_dynamic_cache(model.config)),
}


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize(("export", "empty"), CASES.values(), ids=CASES.keys())
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
def test_the_exported_program_decodes_as_eager_does(export, empty, strict: bool, model, eager: list[int]) -> None:
    with registered():
        program = export(model, strict)
        assert decoded(program, empty(model)) == eager
    names = [node.name for node in program.graph.nodes if node.op == "placeholder"]
    assert {"input_ids", "cache_layers_0_keys", "cache_layers_1_values"} <= set(names)


LATER = """
import sys, torch
from pipeline.caches import registered, empty_dynamic_cache
from tests import tiny
from tests.test_export_plain import CASES, decoded

with registered():
    program = torch.export.load(sys.argv[1])
    print(decoded(program, CASES[sys.argv[2]][1](tiny.llama())))
"""


@pytest.mark.parametrize("kind", CASES)
def test_a_saved_program_decodes_alike_in_another_process(kind: str, model, eager: list[int], tmp_path: Path) -> None:
    with registered():
        torch.export.save(CASES[kind][0](model, False), tmp_path / "program.pt2")
    command = [sys.executable, "-c", LATER, str(tmp_path / "program.pt2"), kind]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == str(eager)
