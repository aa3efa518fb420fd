"""What a model is told or computes another way while it is traced, and that nothing of it is left afterwards."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from pipeline.artifacts import Quantized
from pipeline.attention import attention_of
from pipeline.caches.device import AttentionShape, DeviceCache, LayerShape, device_cache
from pipeline.caches.own_states import state_keeping
from pipeline.config import CacheSettings, ExportSettings
from pipeline.experts import exportable_experts
from pipeline.export import export
from pipeline.positions import given_positions
from pipeline.register import cache_argument, register
from pipeline.tasks.text_generation import plan
from runners.errors import UserError
from tests.zoo import families

pytestmark = pytest.mark.export


def model_of(config: tf.PreTrainedConfig) -> tf.PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return tf.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


@torch.no_grad()
def test_llama_4_experts_say_the_same_in_a_batch() -> None:
    model = model_of(families.llama4())
    layer = next(module for module in model.modules() if isinstance(module, Llama4TextMoe))
    own, x = Llama4TextMoe.forward, torch.randn(1, 7, 32)
    expected, expected_scores = layer(x.clone())
    with exportable_experts(model):
        assert Llama4TextMoe.forward is not own
        said, scores = layer(x)
    assert Llama4TextMoe.forward is own
    torch.testing.assert_close(said, expected)
    torch.testing.assert_close(scores, expected_scores)


def cache() -> DeviceCache:
    return device_cache("portable", [LayerShape(AttentionShape(4, 8, 8))] * 2, 48, torch.float32)


@torch.no_grad()
def test_opt_is_told_its_positions() -> None:
    model, given = model_of(families.opt()), list[torch.Tensor]()
    model.model.decoder.embed_positions.register_forward_pre_hook(
        lambda module, args, kwargs: given.append(kwargs["position_ids"]), with_kwargs=True
    )
    here = cache()
    here.position = torch.tensor([5])
    ids = torch.tensor([[3, 4, 6]])
    with given_positions(model, "cache"):
        model(input_ids=ids, cache=here)
    assert given[0].tolist() == [[5, 6, 7]]
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(("config", "name"), [(families.gpt2, "cache"), (families.opt, None)])
def test_other_models_and_models_without_a_cache_count_themselves(config, name) -> None:
    model = model_of(config())
    with given_positions(model, name):
        assert not model._forward_pre_hooks


@pytest.mark.parametrize("config", [families.minimax, families.recurrent_gemma, families.rwkv])
def test_states_outside_of_transformers_caches_are_given_and_taken_for_a_trace_only(config) -> None:
    """A step on the device's cache says what eager says, the second step too, and a new sequence begins at zero."""
    model = model_of(config())
    name, settings = cache_argument(model), ExportSettings(attention="portable", max_prefill_length=1)
    registered = register(Quantized(model, {}), CacheSettings(max_length=48), settings)
    assert any(tensor.kind == "recurrent" for tensor in registered.layout.tensors)
    said = []
    with torch.no_grad(), state_keeping(model).scope(model, name), attention_of(model, "portable"):
        for position, token in enumerate((5, 6)):
            registered.cache.position = torch.tensor([position])
            said.append(model(input_ids=torch.tensor([[token]]), **{name: registered.cache}).logits[0, -1])
        registered.cache.position = torch.tensor([0])
        again = model(input_ids=torch.tensor([[5]]), **{name: registered.cache}).logits[0, -1]
    assert not model._forward_pre_hooks and not model._forward_hooks
    assert model.config.use_cache
    whole = model(input_ids=torch.tensor([[5, 6]]), use_cache=True).logits[0]
    torch.testing.assert_close(torch.stack(said), whole, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(again, said[0])


def test_a_model_that_loops_over_tokens_says_what_to_set() -> None:
    model, settings = model_of(families.mamba()), ExportSettings()
    registered = register(Quantized(model, {}), CacheSettings(max_length=48), settings)
    with pytest.raises(UserError, match=r"^export\.max_prefill_length: MambaForCausalLM .* set it to 1: .*specialized"):
        export(registered, plan(registered, settings), {})
