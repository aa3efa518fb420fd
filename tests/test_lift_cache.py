"""Where the cache of an exported program lives: signatures, names, state, and the same numbers as eager."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from transformers import BloomConfig, BloomForCausalLM, LlamaForCausalLM

from pipeline.artifacts import Exported, Quantized
from pipeline.attention import attention_of
from pipeline.caches import AttentionShape, LayerShape, device_cache, registered
from pipeline.config import CacheSettings, ExportSettings
from pipeline.export import export
from pipeline.passes.lift_cache import CacheLeaf, lift_cache
from pipeline.register import register
from pipeline.tasks.text_generation import plan
from runners.errors import UserError
from tests import tiny

pytestmark = [
    pytest.mark.export,
    pytest.mark.filterwarnings("ignore:_check_is_size:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]

LENGTH, LAYERS, KV_HEADS, WIDTH, VOCABULARY = 32, 2, 2, 16, 300
PATHS = [f"cache.layers.{i}.{what}" for i in range(LAYERS) for what in ("keys", "values")]
NAMES = [path.replace(".", "_") for path in PATHS]
CASES = {
    "custom in buffers": ("custom", "buffer"),
    "portable in buffers": ("portable", "buffer"),
    "portable as inputs and outputs": ("portable", "io"),
}


def placed(model: LlamaForCausalLM, attention: str, placement: str, **settings: object) -> Exported:
    cache, how = CacheSettings(max_length=LENGTH, placement=placement), ExportSettings(attention=attention, **settings)
    registered_model = register(Quantized(model, {"linear": "as it was"}), cache, how)
    return export(registered_model, plan(registered_model, how), {})


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny.llama()


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest, model: LlamaForCausalLM) -> tuple[str, str, Exported]:
    """Attention, placement, and the program; not to be changed."""
    return *request.param, placed(model, *request.param)


class Decoder:
    """Calls a placed program as a runner does."""

    def __init__(self, program: ExportedProgram, placement: str) -> None:
        program = copy.copy(program)  # shares its weights, and not its state: a cache that is read later begins empty
        program._state_dict = {name: x.clone() if name in PATHS else x for name, x in program.state_dict.items()}
        self.module, self.placement = program.module(), placement
        self.cache = [torch.zeros(1, KV_HEADS, LENGTH, WIDTH) for _ in PATHS] if placement == "io" else []

    def __call__(self, ids: list[int], position: int) -> torch.Tensor:
        inputs = dict(zip(NAMES, self.cache, strict=False))
        output = self.module(tokens=torch.tensor([ids]), position=torch.tensor([position]), **inputs)
        if self.placement == "io":
            output, *self.cache = output
        return output


PROMPT = [5, 6, 7, 8, 9, 200]


def test_prefill_steps_and_a_second_prompt_give_eagers_logits(case, model: LlamaForCausalLM) -> None:
    _, placement, exported = case
    call = Decoder(exported.programs["forward"], placement)
    for prompt in (PROMPT, [17, 30]):  # the second one must not see what the first left behind
        tokens, logits = list(prompt), call(prompt, 0)
        for _ in range(4):
            expected = model(input_ids=torch.tensor([tokens])).logits[:, -1:]
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
            tokens.append(int(logits.argmax()))
            logits = call(tokens[-1:], len(tokens) - 1)


def test_a_prompt_in_two_parts_gives_the_same_logits(case, model: LlamaForCausalLM) -> None:
    _, placement, exported = case
    call = Decoder(exported.programs["forward"], placement)
    call(PROMPT[:3], 0)
    expected = model(input_ids=torch.tensor([PROMPT])).logits[:, -1:]
    torch.testing.assert_close(call(PROMPT[3:], 3), expected, atol=1e-4, rtol=1e-4)


def test_the_cache_can_be_filled_to_its_last_position(case, model: LlamaForCausalLM) -> None:
    _, placement, exported = case
    call, ids = Decoder(exported.programs["forward"], placement), torch.arange(10, 10 + LENGTH).tolist()
    call(ids[:-1], 0)
    expected = model(input_ids=torch.tensor([ids])).logits[:, -1:]
    torch.testing.assert_close(call(ids[-1:], LENGTH - 1), expected, atol=1e-4, rtol=1e-4)


def test_inputs_and_outputs_are_those_of_the_contract(case) -> None:
    _, placement, exported = case
    signature = exported.facts.signatures["forward"]
    cache = PATHS if placement == "io" else []
    assert [x.name for x in signature.inputs] == ["tokens", "position", *cache]
    assert [x.name for x in signature.outputs] == ["logits", *cache]
    tokens, position = signature.inputs[:2]
    assert (tokens.dtype, tokens.min_shape, tokens.shape) == ("int64", [1, 1], [1, LENGTH])
    assert (position.dtype, position.min_shape, position.shape) == ("int64", [1], [1])
    assert signature.outputs[0].shape == [1, 1, VOCABULARY]
    assert all(x.shape == x.min_shape == [1, KV_HEADS, LENGTH, WIDTH] for x in signature.inputs[2:])


def test_the_program_knows_no_cache_class_and_no_flag(case) -> None:
    _, placement, exported = case
    program = exported.programs["forward"]
    names = ["tokens", "position", *(NAMES if placement == "io" else [])]
    assert list(program.example_inputs[1]) == names
    assert program.call_spec.in_spec.child(1).context == names
    kinds = [spec.kind for spec in program.graph_signature.input_specs]
    assert kinds.count(InputKind.USER_INPUT) == len(names)
    assert kinds == sorted(kinds, key=lambda kind: kind == InputKind.USER_INPUT)
    placeholders = [node.name for node in program.graph.nodes if node.op == "placeholder"]
    assert placeholders == [spec.arg.name for spec in program.graph_signature.input_specs]
    assert not [node for node in program.graph.nodes if "_assert_" in str(node.target)]


def test_buffers_are_mutable_state_that_begins_with_zeros(case) -> None:
    attention, placement, exported = case
    program = exported.programs["forward"]
    mutated = [s.target for s in program.graph_signature.output_specs if s.kind == OutputKind.BUFFER_MUTATION]
    if placement == "io":
        assert mutated == []
        assert not set(PATHS) & set(program.state_dict)
        return
    assert mutated == PATHS
    shape = (KV_HEADS, LENGTH, 1, WIDTH) if attention == "custom" else (1, KV_HEADS, LENGTH, WIDTH)
    for path in PATHS:
        assert program.state_dict[path].shape == shape
        assert not program.state_dict[path].any()


def test_the_layout_lists_each_tensor_with_its_bytes(case) -> None:
    attention, placement, exported = case
    layout = exported.facts.cache
    assert (layout.attention, layout.placement, layout.max_length) == (attention, placement, LENGTH)
    assert [x.path for x in layout.tensors] == PATHS
    assert all(x.bytes == 4 * KV_HEADS * LENGTH * WIDTH for x in layout.tensors)
    assert layout.bytes == sum(x.bytes for x in layout.tensors)


def test_a_saved_program_gives_the_same_logits(case, tmp_path: Path) -> None:
    _, placement, exported = case
    torch.export.save(exported.programs["forward"], tmp_path / "forward.pt2")
    again = torch.export.load(tmp_path / "forward.pt2")
    first, second = (Decoder(program, placement) for program in (exported.programs["forward"], again))
    assert torch.equal(first(PROMPT, 0), second(PROMPT, 0))
    assert torch.equal(first([3], len(PROMPT)), second([3], len(PROMPT)))


def test_export_leaves_model_and_attention_as_they_were(model: LlamaForCausalLM) -> None:
    before, attention = model(input_ids=torch.tensor([PROMPT])).logits, model.config._attn_implementation
    placed(model, "custom", "buffer")
    assert model.config._attn_implementation == attention
    assert torch.equal(model(input_ids=torch.tensor([PROMPT])).logits, before)
    assert not any(p.requires_grad for p in model.parameters())


def test_decode_takes_one_token_and_all_logits_can_be_asked_for(model: LlamaForCausalLM) -> None:
    exported = placed(model, "custom", "buffer", methods=("forward", "decode"), logits="all", max_prefill_length=8)
    forward, decode = exported.facts.signatures["forward"], exported.facts.signatures["decode"]
    assert (forward.inputs[0].min_shape, forward.inputs[0].shape) == ([1, 1], [1, 8])
    assert (forward.outputs[0].min_shape, forward.outputs[0].shape) == ([1, 1, VOCABULARY], [1, 8, VOCABULARY])
    assert decode.inputs[0].shape == decode.inputs[0].min_shape == [1, 1]
    logits = Decoder(exported.programs["forward"], "buffer")(PROMPT, 0)
    expected = model(input_ids=torch.tensor([PROMPT])).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("longest", [1, 2, 3])
def test_very_short_calls_can_be_exported(longest: int, model: LlamaForCausalLM) -> None:
    exported = placed(model, "custom", "buffer", max_prefill_length=longest)
    assert exported.facts.signatures["forward"].inputs[0].shape == [1, longest]
    call = Decoder(exported.programs["forward"], "buffer")
    logits = [call([token], position) for position, token in enumerate(PROMPT)][-1]
    expected = model(input_ids=torch.tensor([PROMPT])).logits[:, -1:]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


# What is refused


def traced(module: nn.Module) -> ExportedProgram:
    cache = device_cache("portable", [LayerShape(AttentionShape(KV_HEADS, WIDTH, WIDTH))], LENGTH, torch.float32)
    return torch.export.export(
        module, (), {"ids": torch.tensor([1, 2]), "cache": cache}, strict=False
    ).run_decompositions({})


LEAVES = [CacheLeaf(f"cache_layers_0_{what}", f"cache.layers.0.{what}") for what in ("keys", "values")]


class Writer(nn.Module):
    """Writes its cache, or part of it, or more than that."""

    def __init__(self, keys: bool = True, values: bool = True, ids: bool = False) -> None:
        super().__init__()
        self.keys, self.values, self.ids = keys, values, ids

    def forward(self, ids, cache) -> dict[str, torch.Tensor]:
        layer = cache.layers[0]
        if self.keys:
            layer.keys.add_(1)
        if self.values:
            layer.values.add_(1)
        if self.ids:
            ids.add_(1)
        return {"logits": layer.keys.sum() + layer.values.sum() + ids, "other": ids + 1}


@pytest.mark.parametrize("placement", ["buffer", "io"])
def test_a_cache_that_is_not_written_is_refused_by_its_path(placement: str) -> None:
    with registered(), pytest.raises(UserError, match=r"never writes cache\.layers\.0\.values: its forward"):
        lift_cache(traced(Writer(values=False)), LEAVES, placement, ("logits",), {})


def test_another_input_that_is_written_is_refused_by_its_name() -> None:
    with registered(), pytest.raises(UserError, match="writes the input ids in place"):
        lift_cache(traced(Writer(ids=True)), LEAVES, "buffer", ("logits",), {})


def test_an_output_that_is_not_there_is_refused_with_those_that_are() -> None:
    with registered(), pytest.raises(UserError, match="returns no scores; it returns logits, other"):
        lift_cache(traced(Writer()), LEAVES, "buffer", ("scores",), {})


def test_outputs_are_kept_in_the_order_asked_for() -> None:
    with registered():
        program = lift_cache(traced(Writer()), LEAVES, "buffer", ("other", "logits"), {"ids": "tokens"})
    other, logits = program.module()(tokens=torch.tensor([4, 5]), cache_position=torch.tensor([0]))
    assert other.tolist() == [5, 6]
    assert logits.tolist() == [2 * KV_HEADS * LENGTH * WIDTH + x for x in (4, 5)]


# A method that does not write the whole cache


def uses(*found: str) -> list[CacheLeaf]:
    return [replace(leaf, use=use) for leaf, use in zip(LEAVES, found, strict=True)]


def test_a_leaf_that_is_only_read_is_a_mutable_buffer_that_keeps_its_value() -> None:
    with registered():
        program = lift_cache(traced(Writer(values=False)), uses("written", "read"), "buffer", ("logits",), {})
    assert set(program.graph_signature.buffers_to_mutate.values()) == {leaf.path for leaf in LEAVES}
    program.state_dict["cache.layers.0.values"].fill_(2)
    module = program.module()
    first, second = (module(ids=torch.tensor([0, 1]), cache_position=torch.tensor([0])).tolist() for _ in range(2))
    assert [first[0], second[0]] == [
        3 * KV_HEADS * LENGTH * WIDTH,
        4 * KV_HEADS * LENGTH * WIDTH,
    ]  # keys count up, values stay


def test_a_leaf_that_is_only_to_be_read_and_is_written_is_refused_by_its_path() -> None:
    with registered(), pytest.raises(UserError, match=r"writes cache\.layers\.0\.values in a method that is only to"):
        lift_cache(traced(Writer()), uses("written", "read"), "buffer", ("logits",), {})


def test_what_is_written_to_an_unused_leaf_is_dropped_and_so_is_an_input_that_nothing_reads() -> None:
    with registered():
        dropped = ("cache_position",)
        program = lift_cache(traced(Writer()), uses("unused", "unused"), "buffer", ("other",), {}, dropped)
    assert [spec.arg.name for spec in program.graph_signature.input_specs] == ["ids"]
    assert program.state_dict == {}
    assert program.module()(ids=torch.tensor([4, 7])).tolist() == [5, 8]


@pytest.mark.parametrize(("leaves", "dropped"), [(uses("written", "unused"), ()), (LEAVES, ("ids",))])
def test_what_is_to_be_dropped_and_is_needed_is_refused_by_its_name(leaves: list[CacheLeaf], dropped) -> None:
    needed = dropped[0] if dropped else "cache_layers_0_values"
    with registered(), pytest.raises(UserError, match=f"needs {needed} in a method that is to do without it"):
        lift_cache(traced(Writer()), leaves, "buffer", ("logits",), {}, dropped)


def test_layers_of_another_kind_and_too_long_a_cache_are_refused() -> None:
    model = tiny.llama(replace(tiny.Shape(), max_positions=16))
    with pytest.raises(UserError, match=r"cache\.max_length: 17 tokens exceed the 16 positions"):
        register(Quantized(model, {}), CacheSettings(max_length=17), ExportSettings())
    register(Quantized(model, {}), CacheSettings(max_length=16), ExportSettings())


def test_a_model_that_attends_by_code_of_its_own_takes_portable_attention_only() -> None:
    config = BloomConfig(vocab_size=60, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3)
    model = BloomForCausalLM(config).eval().requires_grad_(False)
    with pytest.raises(UserError, match=r"export\.attention: custom does not fit.*code of its own.*portable"):
        placed(model, "custom", "buffer")
    module = placed(model, "portable", "buffer").programs["forward"].module()
    logits = module(tokens=torch.tensor([PROMPT[:5]]), position=torch.tensor([0]))
    expected = model(input_ids=torch.tensor([PROMPT[:5]])).logits[:, -1:]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_attention_is_as_before_after_an_exception(model: LlamaForCausalLM) -> None:
    before = model.config._attn_implementation
    with pytest.raises(RuntimeError, match="inside"), attention_of(model, "custom"):
        assert model.config._attn_implementation == "pteline_custom"
        raise RuntimeError("inside")
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("attention", "mechanism"),
    [("custom", "softcap"), ("custom", "s_aux"), ("custom", "head_mask"), ("portable", "head_mask")],
)
def test_an_attention_mechanism_that_is_not_there_is_refused(attention: str, mechanism: str) -> None:
    from pipeline import attention as functions

    tensor = torch.zeros(1, 1, 1, 4)
    with pytest.raises(UserError, match=rf"export\.attention: .*\({mechanism}\)"):
        getattr(functions, attention)(nn.Module(), tensor, tensor, tensor, 0, **{mechanism: 1.0})
