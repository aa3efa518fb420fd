"""Which models read images as a program can: the others are refused, each with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from pipeline.artifacts import Extras, Quantized
from pipeline.config import CacheSettings, ExportSettings
from pipeline.tasks import TASKS
from pipeline.tasks.infer import infer_task
from pipeline.vision import image_size, read_image_prompt, vision_of
from runners.errors import UserError
from tests import tiny_vlm as tiny
from tests.tiny import tokenizer as text_tokenizer

TASK = TASKS["image-text-to-text"]
VISION = {**tiny.VISION, "model_type": "siglip_vision_model", "vision_use_head": False}


def small(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        return TASK.auto_model.from_config(config).eval()


def register(model: PreTrainedModel) -> object:
    return TASK.register(Quantized(model, {}, Extras()), CacheSettings(max_length=32), ExportSettings())


@pytest.mark.parametrize("architecture", tiny.MODELS)
def test_the_task_is_that_of_the_architecture(architecture: str) -> None:
    assert infer_task(tiny.model(architecture).config, None) == "image-text-to-text"


def test_images_that_see_each_other_are_refused() -> None:
    text = {**tiny.TEXT, "layer_types": ["full_attention"] * 2}
    config = transformers.Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4)
    with pytest.raises(UserError, match="Gemma3ForConditionalGeneration the features of one image see each other"):
        register(small(config))


def test_features_that_take_more_than_pixels_are_refused() -> None:
    text = {"model_type": "llama", **tiny.TEXT}
    config = transformers.LlavaNextConfig(text_config=text, vision_config=VISION, image_token_index=tiny.IMAGE_ID)
    model = small(config)
    with pytest.raises(UserError, match="makes features of an image's pixels and of image_sizes"):
        vision_of(config).features(model, torch.zeros(1, 3, tiny.PIXELS, tiny.PIXELS))


def test_an_encoder_beside_the_decoder_is_refused() -> None:
    config = transformers.BartConfig(d_model=16, encoder_layers=1, decoder_layers=1, vocab_size=8)
    model = transformers.BartForConditionalGeneration(config)
    with pytest.raises(UserError, match="BartForConditionalGeneration does not read images"):
        register(model)


def test_images_of_any_size_are_refused() -> None:
    with pytest.raises(UserError, match=r"states no vision_config\.image_size"):
        image_size(transformers.Qwen2VLConfig())


def test_a_tokenizer_without_the_tokens_around_images_is_refused(tmp_path: Path) -> None:
    text_tokenizer(300).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"the tokenizer has no <fake_token_around_image>, <global-img>"):
        read_image_prompt(tmp_path, transformers.SmolVLMConfig(image_token_id=5))
