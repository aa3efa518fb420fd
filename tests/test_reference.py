"""Quantized weights as plain arithmetic: rounded as torchao rounds, in float32 and in float64."""

from __future__ import annotations

import pytest
import torch
from torchao.quantization import IntxUnpackedToInt8Tensor
from torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor import (
    _apply_int8_act_asym_per_token_quant_dequant as torchao_s,
)
from transformers import MixtralConfig, MixtralForCausalLM

from pipeline.artifacts import Loaded
from pipeline.config import QuantizeSettings
from pipeline.experts import experts_one_by_one
from pipeline.quantization.reference import fake_quantize, quantizes_activations, reference_of
from pipeline.quantize import quantize
from tests import tiny

EIGHT_BITS = {"linear": "8da4w", "lm_head": "8da8w", "embedding": "8w"}


@pytest.fixture(scope="module")
def model():
    return tiny.llama()


def quantized(model, **settings: object):
    return quantize(Loaded(model, None, None), QuantizeSettings(**settings)).model


def logits(model, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    ids = torch.randint(3, 300, (2, 20), generator=torch.Generator().manual_seed(4))
    with torch.inference_mode():
        found = model(ids, use_cache=False).logits
    assert found.dtype == dtype
    return found


def values(kind: str) -> torch.Tensor:
    """Rows of one kind, float32 [R, I]."""
    normal = torch.randn(300, 192, generator=torch.Generator().manual_seed(0))
    scale = 10 ** torch.linspace(-30, 30, 300)[:, None]
    return {
        "of all sizes": normal * scale,
        "positive": normal.abs() + 1,
        "negative": -normal.abs() - 1,
        "zero": torch.zeros(3, 64),
        "subnormal": normal * 1e-40,
        # 255 steps from 0 to 255: every other value lies halfway between two of them
        "halves": torch.cat([torch.tensor([0.0, 255.0]), torch.arange(0, 255, 0.5)]).repeat(3, 1),
        "halves around zero": torch.cat([torch.tensor([-100.0, 155.0]), torch.arange(-100, 155, 0.5)]).repeat(3, 1),
        "one outlier": torch.cat([normal, torch.full((300, 1), 1e4)], 1),
    }[kind]


@pytest.mark.parametrize(
    "kind",
    ["of all sizes", "positive", "negative", "zero", "subnormal", "halves", "halves around zero", "one outlier"],
)
def test_rows_are_rounded_as_torchao_rounds_them(kind: str) -> None:
    rows = values(kind)
    assert torch.equal(fake_quantize(rows), torchao_s(rows))


@pytest.mark.parametrize("shape", [(1, 1, 576), (3, 700, 100), (2, 5, 40000), (7,)])
def test_any_shape_is_rounded_row_by_row(shape: tuple[int, ...]) -> None:
    """Fewer values than are taken at a time, more, and rows that are longer than that."""
    given = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    before = given.clone()
    assert torch.equal(fake_quantize(given), torchao_s(given))
    assert torch.equal(given, before)


def test_rows_of_a_view_are_rounded_as_those_of_a_copy() -> None:
    given = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(2)).transpose(1, 2)
    assert torch.equal(fake_quantize(given), torchao_s(given.contiguous()))


@pytest.mark.parametrize(
    ("settings", "does"),
    [({"linear": "8da4w"}, True), ({"lm_head": "8da8w"}, True), ({"embedding": "8w"}, False), ({}, False)],
)
def test_which_packages_quantize_activations(model, settings: dict[str, object], does: bool) -> None:
    assert quantizes_activations(quantized(model, **settings)) is does


def test_in_float64_the_same_weights_compute_nearly_the_same(model) -> None:
    """Weights alone are quantized: nothing is rounded on the way, so only the last bits differ."""
    one = quantized(model, embedding="8w")
    precise = logits(reference_of(one, torch.float64), torch.float64)
    assert not torch.equal(precise.float(), logits(one))
    torch.testing.assert_close(precise.float(), logits(one), atol=1e-4, rtol=1e-4)
    assert float((precise.float() - logits(model)).abs().max()) > 1e-2


def test_in_float64_activations_are_rounded_as_in_float32(model) -> None:
    one = quantized(model, **EIGHT_BITS)
    precise = reference_of(one, torch.float64)
    layer = precise.model.layers[0].mlp.down_proj
    given = torch.randn(1, 5, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = torchao_s(given.float()).double() @ one.model.layers[0].mlp.down_proj.weight.dequantize().double().T
    torch.testing.assert_close(layer(given), expected, atol=1e-12, rtol=1e-12)
    apart = (logits(precise, torch.float64) - logits(model)).abs().mean()
    assert float((logits(precise, torch.float64) - logits(one)).abs().mean()) < float(apart) / 5


def test_from_weights_that_are_unpacked_already_float64_computes_the_same(model) -> None:
    one = quantized(model, **EIGHT_BITS)
    unpacked = reference_of(one)
    again = reference_of(unpacked, torch.float64)
    assert torch.equal(logits(again, torch.float64), logits(reference_of(one, torch.float64), torch.float64))
    assert torch.equal(logits(unpacked), logits(one))


def test_the_float64_copy_leaves_both_models_as_they_are(model) -> None:
    one = quantized(model, linear="8da4w")
    before = {name: (id(p), p.dtype) for name, p in one.state_dict(keep_vars=True).items()}
    expected = logits(one)
    precise = reference_of(one, torch.float64)
    assert precise.model.layers[0].mlp.down_proj.weight.dtype == torch.float64
    assert {name: (id(p), p.dtype) for name, p in one.state_dict(keep_vars=True).items()} == before
    assert isinstance(one.model.layers[0].mlp.down_proj.weight, IntxUnpackedToInt8Tensor)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {b.dtype for b in model.buffers()} == {torch.float32}
    assert torch.equal(logits(one), expected)


def test_a_weight_that_two_layers_share_is_shared_in_float64(model) -> None:
    precise = reference_of(model, torch.float64)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    stored = [layer._parameters["weight"] for layer in (precise.lm_head, precise.model.embed_tokens)]
    assert stored[0] is stored[1] is model.lm_head.weight
    assert precise.lm_head.weight.dtype == torch.float64


def test_no_weight_is_held_in_float64(model) -> None:
    """Only what is made while a layer runs is: together they would take twice the memory of the model."""
    precise = reference_of(quantized(model, **EIGHT_BITS), torch.float64)
    assert {p.dtype for p in precise.parameters()} == {torch.float32}


def test_experts_are_computed_in_float64_too() -> None:
    sizes = dict(vocab_size=300, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
    config = MixtralConfig(**sizes, num_hidden_layers=1, num_local_experts=4, max_position_embeddings=64)
    model = quantized(MixtralForCausalLM(config).eval().requires_grad_(False), linear="8da4w", scales="minmax")
    precise = reference_of(model, torch.float64)
    with experts_one_by_one(precise):
        said = logits(precise, torch.float64)
    torch.testing.assert_close(said.float(), logits(model), rtol=0, atol=0.05)
