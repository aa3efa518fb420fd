"""The stock runner's verdict: a conforming program loads, and each broken rule is named."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from runners.pte import (
    ConstantMethod,
    DelegateUse,
    MethodDescription,
    OperatorUse,
    ProgramDescription,
    TensorDescription,
)
from runners.stock_contract import MULTIMODAL, stock_runner_verdict

TOKENS = TensorDescription("tokens", "int64", (1, 127), dynamic=True)
ONE_TOKEN = TensorDescription("tokens", "int64", (1, 1), dynamic=False)
POSITION = TensorDescription("position", "int64", (1,), dynamic=False)
LOGITS = TensorDescription("logits", "float32", (1, 1, 300), dynamic=False)
IDS = TensorDescription("", "int64", (1, 1, 300), dynamic=False)
CACHE = TensorDescription("cache.layers.0.keys", "float32", (1, 128, 2, 16), dynamic=False)
FORWARD = MethodDescription("forward", (TOKENS, POSITION), (LOGITS,), (4096,), (), ())
CONSTANTS = {
    "get_max_seq_len": 128,
    "get_max_context_len": 128,
    "enable_dynamic_shape": True,
    "use_kv_cache": True,
    "get_eos_ids": (1, 2),
}


def program(*methods: MethodDescription, **constants) -> ProgramDescription:
    """A conforming program of these methods; a constant of None is left out."""
    chosen = {name: value for name, value in {**CONSTANTS, **constants}.items() if value is not None}
    described = [ConstantMethod(k, v if isinstance(v, tuple) else (v,)) for k, v in chosen.items()]
    return ProgramDescription(1000, 0, methods or (FORWARD,), tuple(described), external_data=False)


def with_inputs(*inputs: TensorDescription) -> MethodDescription:
    return replace(FORWARD, inputs=inputs)


def with_output(**changes) -> MethodDescription:
    return replace(FORWARD, outputs=(replace(LOGITS, **changes),))


def test_a_conforming_program_loads() -> None:
    verdict = stock_runner_verdict(program(), tokenizer_vocabulary=300)
    assert verdict.loads
    assert verdict.reasons == ()
    assert verdict.notes == ()


@pytest.mark.parametrize(
    "conforming",
    [
        program(with_inputs(ONE_TOKEN, POSITION), enable_dynamic_shape=False),
        program(with_inputs(TOKENS, TensorDescription(None, "int64", (127,), dynamic=True))),
        program(with_output(shape=(1, 300))),
        program(with_output(shape=(1, 127, 300), dynamic=True)),
        program(with_output(dtype="bfloat16")),
        program(with_inputs(TOKENS), use_kv_cache=False),
        program(replace(FORWARD, name="prefill")),
        program(FORWARD, replace(FORWARD, name="decode_one", inputs=(ONE_TOKEN, POSITION))),
        program(with_inputs(replace(TOKENS, shape=(1, 64)), POSITION), get_max_seq_len=64),
    ],
)
def test_other_conforming_programs(conforming: ProgramDescription) -> None:
    assert stock_runner_verdict(conforming).reasons == ()


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (program(replace(FORWARD, name="main")), "no method 'forward', nor the pair .* the file has: main"),
        (program(replace(FORWARD, name="decode")), "no method 'forward'"),
        (program(*[replace(FORWARD, name=name) for name in MULTIMODAL]), "which ExecuTorch's MultimodalRunner calls"),
        (program(get_max_seq_len=None), "no constant method 'get_max_seq_len'"),
        (program(get_max_seq_len=(128, 2)), r"'get_max_seq_len' returns \[128, 2\]; the runner takes one number"),
        (program(use_kv_cache="yes"), "'use_kv_cache' returns .*yes"),
        (program(get_max_seq_len=0), "'get_max_seq_len' is 0; expected at least 1"),
        (program(get_eos_ids=(1, "x")), "'get_eos_ids' returns 'x' among its values"),
        (program(with_inputs(TOKENS, POSITION, CACHE)), "forward has 3 inputs; the stock runner passes exactly two"),
        (program(with_inputs()), "forward has 0 inputs"),
        (program(with_inputs(TOKENS)), "takes no position, but 'use_kv_cache' is true or absent"),
        (program(use_kv_cache=False), "takes a position, but 'use_kv_cache' is false"),
        (program(with_inputs(replace(TOKENS, dtype="int32"), POSITION)), r"input 0 is int32 \[1, 127\]"),
        (program(with_inputs(replace(TOKENS, shape=(2, 127)), POSITION)), r"input 0 is int64 \[2, 127\]"),
        (program(with_inputs(replace(TOKENS, shape=(127,)), POSITION)), r"input 0 is int64 \[127\]"),
        (program(with_inputs(replace(TOKENS, dynamic=False), POSITION)), "takes exactly 127 tokens; with 'enable_dyn"),
        (
            program(with_inputs(replace(TOKENS, dynamic=False), POSITION), enable_dynamic_shape=False),
            "takes exactly 127 tokens; the stock runner passes one at a time",
        ),
        (program(with_inputs(replace(TOKENS, shape=(1, 64)), POSITION)), "at most 64 tokens a call; .* up to 127"),
        (program(with_inputs(TOKENS, replace(POSITION, dtype="int32"))), r"input 1 is int32 \[1\]"),
        (program(with_inputs(TOKENS, replace(POSITION, shape=()))), r"input 1 is int64 \[\]"),
        (program(with_inputs(TOKENS, replace(POSITION, shape=(127,)))), "takes exactly 127 positions"),
        (
            program(replace(FORWARD, outputs=(LOGITS, *[CACHE] * 61))),
            r"forward has 62 outputs; the stock runner takes exactly one \(cache tensors may not be outputs\)",
        ),
        (
            program(replace(FORWARD, outputs=(replace(LOGITS, shape=(1, 1, 8)), replace(IDS, shape=(1, 1, 8))))),
            r"forward gives the 8 likeliest tokens and their logits \(export\.top_k\); the stock runner chooses itself",
        ),
        (program(with_output(dtype="int64")), r"the output is int64 \[1, 1, 300\]"),
        (program(with_output(shape=(300,))), r"the output is float32 \[300\]; .* \[1, n, V\] or \[1, V\]"),
        (program(FORWARD, replace(FORWARD, name="decode")), "forward and decode: .* decode would not see the cache"),
        (
            program(replace(FORWARD, name="prefill"), replace(FORWARD, name="decode", inputs=(ONE_TOKEN, POSITION))),
            "prefill and decode: .* memory of its own",
        ),
    ],
)
def test_each_broken_rule_is_named(broken: ProgramDescription, reason: str) -> None:
    verdict = stock_runner_verdict(broken)
    assert not verdict.loads
    assert len(verdict.reasons) == 1
    assert re.search(reason, verdict.reasons[0])


def test_fewer_logits_than_tokens() -> None:
    verdict = stock_runner_verdict(program(), tokenizer_vocabulary=301)
    assert verdict.reasons[0].startswith("forward: 300 logits for a tokenizer of 301 tokens")


def test_every_reason_is_given() -> None:
    broken = program(replace(FORWARD, inputs=(TOKENS, POSITION, CACHE), outputs=(LOGITS, CACHE)), get_max_seq_len=None)
    assert len(stock_runner_verdict(broken).reasons) == 3


USES = (OperatorUse("llama::custom_sdpa.out", 30), OperatorUse("executorch_prim::add.Scalar", 1))


@pytest.mark.parametrize(
    ("described", "note"),
    [
        (program(get_eos_id=2), "'get_eos_id' is not read"),
        (program(get_eos_ids=None), "no 'get_eos_ids'"),
        (program(with_inputs(ONE_TOKEN, POSITION), enable_dynamic_shape=None), "token by token"),
        (program(get_max_seq_len=64), "sliding window"),
        (program(replace(FORWARD, operators=USES)), "needs llama::custom_sdpa.out from the custom-ops library"),
        (program(replace(FORWARD, delegates=(DelegateUse("CoreMLBackend", 1),))), "needs CoreMLBackend in the runtime"),
        (replace(program(), external_data=True), ".ptd file"),
    ],
)
def test_notes_for_an_app_that_loads_it(described: ProgramDescription, note: str) -> None:
    verdict = stock_runner_verdict(described)
    assert verdict.loads
    assert len(verdict.notes) == 1
    assert note in verdict.notes[0]
