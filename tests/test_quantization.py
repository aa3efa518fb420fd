"""Quantized weights: the numbers of torchao, the source untouched, tied embeddings, sizes that do not fit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchao.quantization import IntxUnpackedToInt8Tensor
from transformers import LlamaForCausalLM

from pipeline.artifacts import Loaded, Quantized
from pipeline.config import QuantizeSettings
from pipeline.quantization.reference import reference_of
from pipeline.quantization.scales import input_importance, searched_scales
from pipeline.quantization.schemes import EMBEDDING_SCHEMES, LINEAR_SCHEMES
from pipeline.quantize import quantize
from runners.errors import UserError
from tests import tiny

IDS = torch.tensor([[5, 6, 7, 8, 290, 3]])


def quantized(model: LlamaForCausalLM, **settings: object) -> Quantized:
    return quantize(Loaded(model, identity=None, tokenizer=None), QuantizeSettings(**settings))


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def quantized_weights(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if isinstance(p, IntxUnpackedToInt8Tensor)}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny.llama()


CASES: dict[str, dict[str, object]] = {
    **{f"linear {name}": {"linear": name} for name, row in LINEAR_SCHEMES.items() if row},
    **{f"embedding {name}": {"embedding": name} for name, row in EMBEDDING_SCHEMES.items() if row},
    "minmax scales": {"linear": "8da4w", "scales": "minmax"},
    "hqq scales": {"linear": "8da4w", "scales": "hqq"},
    "group 64": {"linear": "8da4w", "group_size": 64},
    "8-bit output layer": {"linear": "8da4w", "lm_head": "8da8w", "embedding": "8w"},
    "float output layer": {"linear": "8da4w", "lm_head": "none"},
    "output layer alone": {"lm_head": "8da8w"},
    "grouped table": {"embedding": "4w", "embedding_group_size": 32},
    "grouped 8-bit table": {"embedding": "8w", "embedding_group_size": 32},
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES.keys())
def test_the_reference_computes_what_torchao_computes_bit_for_bit(model, settings: dict[str, object]) -> None:
    one = quantized(model, **settings).model
    assert quantized_weights(one)
    reference = reference_of(one)
    assert not quantized_weights(reference)
    assert torch.equal(logits(reference), logits(one))
    assert not torch.equal(logits(one), logits(model))


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES.keys())
def test_the_source_model_stays_as_it_is(settings: dict[str, object]) -> None:
    model = tiny.llama()
    before = {name: (id(p), p.clone()) for name, p in model.state_dict(keep_vars=True).items()}
    expected = logits(model)
    one = quantized(model, **settings).model
    reference_of(one)
    after = model.state_dict(keep_vars=True)
    assert {name: id(p) for name, p in after.items()} == {name: number for name, (number, _) in before.items()}
    assert all(torch.equal(after[name], value) for name, (_, value) in before.items())
    assert torch.equal(logits(model), expected)
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_reference_leaves_the_quantized_model_as_it_is(model) -> None:
    one = quantized(model, linear="8da4w", embedding="8w").model
    before, names = logits(one), quantized_weights(one)
    reference_of(one)
    assert quantized_weights(one) == names
    assert torch.equal(logits(one), before)


def test_weights_that_are_left_alone_are_shared(model) -> None:
    one = quantized(model, linear="8da4w").model
    reference = reference_of(one)
    for name in ("model.norm.weight", "model.layers.0.input_layernorm.weight", "model.embed_tokens.weight"):
        assert one.get_parameter(name) is model.get_parameter(name)
        assert reference.get_parameter(name) is model.get_parameter(name)


def test_without_a_scheme_nothing_is_done(model) -> None:
    one = quantized(model)
    assert quantized_weights(one.model) == set()
    assert torch.equal(logits(one.model), logits(model))
    assert one.model.lm_head.weight is one.model.model.embed_tokens.weight
    assert list(one.notes) == ["tied"]
    assert "the file holds it twice" in one.notes["tied"]


@pytest.mark.parametrize(("bits", "scheme"), [(4, "8da4w"), (8, "8da8w")])
def test_a_scheme_has_the_bits_of_its_name(model, bits: int, scheme: str) -> None:
    weight = quantized(model, linear=scheme).model.model.layers[0].mlp.gate_proj.weight
    assert weight.qdata.min() >= -(2 ** (bits - 1))
    assert weight.qdata.max() <= 2 ** (bits - 1) - 1
    assert weight.qdata.abs().max() > 2 ** (bits - 2)
    groups = 64 // 32 if bits == 4 else 1
    assert weight.scale.shape == (128, groups)


# Scales of grouped 4-bit weights

NAME = "model.layers.0.mlp.gate_proj"


@pytest.mark.parametrize("scales", ["minmax", "hqq", "imatrix"])
def test_weights_are_rounded_to_scales_that_the_device_stores(model, scales: str) -> None:
    """XNNPACK holds a group's scale as bfloat16."""
    one = quantized(model, linear="8da4w", scales=scales).model
    for name in (NAME, "model.layers.1.self_attn.k_proj", "lm_head"):
        weight, source = one.get_submodule(name).weight, model.get_submodule(name).weight
        assert torch.equal(weight.scale.bfloat16().float(), weight.scale)
        assert not weight.zero_point.any()
        steps = source.view(*weight.scale.shape, 32) / weight.scale.unsqueeze(-1)
        assert torch.equal(weight.qdata.float(), steps.round().clamp(-8, 7).view_as(source))
        assert torch.equal(
            weight.dequantize(), (weight.qdata.view(*steps.shape) * weight.scale.unsqueeze(-1)).view_as(source)
        )


def test_searched_scales_lose_less_than_those_of_the_range(model) -> None:
    ids = torch.randint(0, 300, (64,), generator=torch.Generator().manual_seed(1))
    importance = input_importance(model, {NAME: model.get_submodule(NAME)}, ids, 16)[NAME]
    source, loss = model.get_submodule(NAME).weight, {}
    for scales in ("imatrix", "hqq", "minmax"):
        settings = QuantizeSettings(linear="8da4w", scales=scales)
        one = quantize(Loaded(model, identity=None, tokenizer=None), settings, ids).model
        error = one.get_submodule(NAME).weight.dequantize() - source
        loss[scales] = float((error.square() * importance).sum())
    assert 0 < loss["imatrix"] < loss["hqq"] < loss["minmax"]


def test_the_search_finds_the_best_of_its_candidates_for_each_group() -> None:
    torch.manual_seed(0)
    weight, importance = torch.randn(3, 8), torch.rand(8)
    found = searched_scales(weight, 4, importance)
    assert found.shape == (3, 2)
    for row in range(3):
        for group in range(2):
            part, weights = weight[row, 4 * group :][:4], importance[4 * group :][:4]

            def error(scale: float, part=part, weights=weights) -> float:
                return float(((part / scale).round().clamp(-8, 7).mul(scale).sub(part).square() * weights).sum())

            covering = max(float(part.min()) / -8, float(part.max()) / 7)
            shares = [share / 40 for share in range(24, 43)]  # 0.60 to 1.05
            best = min(error(torch.tensor(covering * s).bfloat16().item()) for s in shares)
            assert error(found[row, group].item()) == pytest.approx(best, rel=1e-5)


def test_a_group_of_zeros_stays_zero() -> None:
    model = tiny.llama()
    model.get_submodule(NAME).weight[5, :32] = 0
    weight = quantized(model, linear="8da4w").model.get_submodule(NAME).weight
    assert weight.scale.isfinite().all()
    assert not weight.dequantize()[5, :32].any()


@pytest.mark.parametrize("window", [7, 16, 100])
def test_importance_is_the_mean_square_of_what_a_layer_is_given(model, window: int) -> None:
    names = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"]
    ids, seen = torch.arange(40), {name: [] for name in names}
    hooks = [
        model.get_submodule(n).register_forward_pre_hook(lambda _, inputs, n=n: seen[n].append(inputs[0][0]))
        for n in names
    ]
    for start in range(0, 40, window):
        model(input_ids=ids[start : start + window].unsqueeze(0))
    for hook in hooks:
        hook.remove()
    found = input_importance(model, {name: model.get_submodule(name) for name in names}, ids, window)
    assert found.keys() == set(names)
    for name in names:
        torch.testing.assert_close(found[name], torch.cat(seen[name]).square().mean(0))
        assert not model.get_submodule(name)._forward_pre_hooks


def test_the_calibration_text_decides_the_scales_and_the_same_one_decides_alike(model) -> None:
    def scale(calibration: torch.Tensor | None) -> torch.Tensor:
        loaded = Loaded(model, identity=None, tokenizer=None)
        return quantize(loaded, QuantizeSettings(linear="8da4w"), calibration).model.get_submodule(NAME).weight.scale

    ids = torch.arange(5, 60)
    assert torch.equal(scale(ids), scale(ids))
    assert torch.equal(scale(None), scale(None))
    assert not torch.equal(scale(ids), scale(None))


# Tied embeddings


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        ({"linear": "8da4w", "embedding": "8w"}, "lm_head 8da4w, embedding 8w"),
        ({"linear": "8da4w"}, "lm_head 8da4w, embedding none"),
        ({"embedding": "4w"}, "lm_head none, embedding 4w"),
    ],
)
def test_a_shared_weight_becomes_two_where_one_of_them_is_quantized(model, settings, note: str) -> None:
    one = quantized(model, **settings)
    assert note in one.notes["tied"]
    assert not one.model.config.tie_word_embeddings
    names = quantized_weights(one.model)
    assert ("lm_head.weight" in names) == (settings.get("linear") == "8da4w")
    assert any("embed_tokens" in name for name in names) == ("embedding" in settings)
    assert torch.equal(model.lm_head.weight, tiny.llama().lm_head.weight)


def test_separate_weights_are_not_spoken_of_as_one() -> None:
    model = tiny.llama(tiny.Shape(tied=False))
    one = quantized(model, linear="8da4w", lm_head="none")
    assert "tied" not in one.notes
    assert one.model.lm_head.weight is model.lm_head.weight


def test_the_notes_say_what_was_done_to_which_weights(model) -> None:
    notes = quantized(model, linear="8da4w", lm_head="8da8w", embedding="4w", embedding_group_size=32).notes
    assert notes["quantize.linear"] == "8da4w, group 32, imatrix scales, 14 weights"
    assert notes["quantize.lm_head"] == "8da8w, one scale a row, minmax scales, 1 weights"
    assert notes["quantize.embedding"] == "4w, group 32, minmax scales, 1 weights"
    assert "quantize.lm_head" not in quantized(model, linear="8da4w", lm_head="none").notes


# What does not fit


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"linear": "8da4w", "group_size": 96},
            r"quantize\.linear: the group size 96 does not divide the 64 input features of "
            r"model\.layers\.0\.self_attn\.q_proj\.weight\. Divisors that suit: 16, 32, 64\.",
        ),
        (
            {"lm_head": "8da4w", "group_size": 96},
            r"quantize\.lm_head: the group size 96 does not divide the 64 input features of lm_head\.weight",
        ),
        (
            {"embedding": "4w", "embedding_group_size": 48},
            r"quantize\.embedding: the group size 48 does not divide the 64 input features of model\.embed_tokens",
        ),
    ],
)
def test_a_group_size_that_does_not_divide_is_refused_with_the_tensors_name(model, settings, message: str) -> None:
    with pytest.raises(UserError, match=message):
        quantized(model, **settings)


def test_a_width_that_the_default_does_not_divide_is_refused() -> None:
    model = tiny.llama(tiny.Shape(hidden=40, heads=2, kv_heads=1))
    with pytest.raises(
        UserError, match=r"group size 32 does not divide the 40 input features.*Divisors that suit: none"
    ):
        quantized(model, linear="8da4w")
