"""Encoder-decoders through plain ``torch.export``: the decoder's step reads the encoder's keys from its cache."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as tf
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache

from pipeline.caches import registered, rewind

pytestmark = pytest.mark.export

SEED = torch.Generator().manual_seed(0)
IDS = torch.randint(3, 64, (1, 16), generator=SEED)
ENCODED = torch.randn(1, 20, 32, generator=SEED)
SIZES = dict(
    vocab_size=64,
    d_model=32,
    encoder_layers=1,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    init_std=0.3,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
)


def t5() -> tf.PreTrainedModel:
    sizes = dict(d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0)
    return tf.T5ForConditionalGeneration(tf.T5Config(vocab_size=64, d_model=32, **sizes, decoder_start_token_id=0))


def whisper() -> tf.PreTrainedModel:
    sizes = dict(max_source_positions=20, max_target_positions=32, num_mel_bins=8)
    return tf.WhisperForConditionalGeneration(tf.WhisperConfig(**SIZES, **sizes))


def bart() -> tf.PreTrainedModel:
    return tf.BartForConditionalGeneration(tf.BartConfig(**SIZES, max_position_embeddings=32))


MODELS = {"t5": t5, "whisper": whisper, "bart": bart}


def seeded(make: Callable[[], tf.PreTrainedModel]) -> tf.PreTrainedModel:
    torch.manual_seed(0)
    return make().eval().requires_grad_(False)


def new(kind: str, config: tf.PreTrainedConfig) -> EncoderDecoderCache:
    if kind == "dynamic":
        return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    return EncoderDecoderCache(StaticCache(config, 32), StaticCache(config, ENCODED.shape[1]))


def step(model: tf.PreTrainedModel, ids: torch.Tensor, cache: EncoderDecoderCache) -> torch.Tensor:
    return model(decoder_input_ids=ids, encoder_outputs=(ENCODED,), cache=cache).logits


def started(kind: str, model: tf.PreTrainedModel) -> EncoderDecoderCache:
    cache = new(kind, model.config)
    step(model, IDS[:, :1], cache)
    return rewind(cache)


def export(kind: str, model: tf.PreTrainedModel, strict: bool = False) -> ExportedProgram:
    example = new(kind, model.config)
    step(model, IDS[:, :3], example)
    names = [path[-1].key for path, _ in pytree.tree_flatten_with_path(example)[0]]
    grows = [{2: Dim.AUTO} if kind == "dynamic" and name.startswith("self") else None for name in names]
    arguments = {"decoder_input_ids": IDS[:, :3], "encoder_outputs": (ENCODED,), "cache": example}
    shapes = {"decoder_input_ids": {1: Dim.AUTO}, "encoder_outputs": (None,), "cache": grows}
    return torch.export.export(model, (), arguments, dynamic_shapes=shapes, strict=strict)


def assert_decodes(program: ExportedProgram, kind: str, model: tf.PreTrainedModel) -> None:
    """Logits as eager's own, which starts from nothing, and one spec from the start to the end."""
    cache, eager, module, at = started(kind, model), new(kind, model.config), program.module(), 0
    spec = pytree.tree_structure(cache)
    for tokens in (5, 2, 1, 1, 1):
        ids, at = IDS[:, at : at + tokens], at + tokens
        output = module(decoder_input_ids=ids, encoder_outputs=(ENCODED,), cache=cache)
        cache = output.cache
        torch.testing.assert_close(output.logits, step(model, ids, eager), atol=1e-4, rtol=1e-4)
        assert pytree.tree_structure(cache) == spec
        assert cache.is_updated == eager.is_updated


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_a_decoder_step_reads_the_encoders_keys(make, kind: str) -> None:
    model = seeded(make)
    with registered():
        program = export(kind, model)
        assert_decodes(program, kind, model)
    names = {node.name for node in program.graph.nodes if node.op == "placeholder"}
    assert {"cache_self_attention_cache_layers_0_keys", "cache_cross_attention_cache_layers_1_values"} <= names


def test_the_keys_come_from_the_cache_and_not_from_the_encoders_output() -> None:
    model = seeded(t5)
    with registered():
        module, cache = export("dynamic", model).module(), started("dynamic", model)
        logits = module(decoder_input_ids=IDS[:, :2], encoder_outputs=(ENCODED * 0,), cache=cache).logits
    torch.testing.assert_close(logits, step(model, IDS[:, :2], new("dynamic", model.config)), atol=1e-4, rtol=1e-4)


def test_the_first_step_returns_a_cache_of_the_same_spec() -> None:
    """A program that computes the encoder's keys takes no cache and returns one that the step's program accepts."""
    model = seeded(t5)
    with registered():
        arguments = {"decoder_input_ids": IDS[:, :3], "encoder_outputs": (ENCODED,), "use_cache": True}
        first = torch.export.export(model, (), arguments, strict=False).module()
        output = first(**arguments)
        assert pytree.tree_structure(output.cache) == pytree.tree_structure(started("dynamic", model))
        module = export("dynamic", model).module()
        logits = module(decoder_input_ids=IDS[:, 3:4], encoder_outputs=(ENCODED,), cache=output.cache).logits
    eager = new("dynamic", model.config)
    step(model, IDS[:, :3], eager)
    torch.testing.assert_close(logits, step(model, IDS[:, 3:4], eager), atol=1e-4, rtol=1e-4)


LATER = """
import sys, torch
from pipeline.caches import registered
from tests import test_caches_encoder_decoder as pair, test_caches_export as single

with registered():
    model = pair.seeded(pair.t5)
    pair.assert_decodes(torch.export.load(sys.argv[1]), "static", model)
    model = single.model_of(single.gemma3())
    single.assert_decodes(torch.export.load(sys.argv[2]), model, single.started("dynamic", model, 0), (5, 1, 7, 1))
print("equal")
"""


def test_saved_programs_decode_alike_in_another_process(tmp_path: Path) -> None:
    from tests import test_caches_export as single

    paths = [str(tmp_path / "pair.pt2"), str(tmp_path / "window.pt2")]
    with registered():
        torch.export.save(export("static", seeded(t5)), paths[0])
        model = single.model_of(single.gemma3())
        torch.export.save(single.export(model, single.started("dynamic", model, 3)), paths[1])
    command = [sys.executable, "-c", LATER, *paths]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().endswith("equal")
