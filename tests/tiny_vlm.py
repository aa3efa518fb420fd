"""Tiny random models that read images beside text, saved as transformers saves them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests import tiny

IMAGE = "<image>"
TOKENS = (IMAGE, "<fake_token_around_image>", "<global-img>")  # ids 300 to 302
VOCABULARY, PIXELS, PATCH = 304, 32, 8
IMAGE_ID = 300
PROMPTS = ["The quick brown fox", "Every morning the baker"]
# As those of vision models: contents are lists, and of a bare text nothing would be left.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": PIXELS,
    "patch_size": PATCH,
    "initializer_range": 0.3,
}
IDEFICS = {"scale_factor": 2, "image_token_id": IMAGE_ID, "pad_token_id": 0, "vision_config": VISION}
MODELS = {  # architecture -> its config class, settings and image processor
    "SmolVLMForConditionalGeneration": (
        "SmolVLMConfig",
        {**IDEFICS, "text_config": {"model_type": "llama", **TEXT}, "tie_word_embeddings": True},
        "SmolVLMImageProcessor",
    ),
    "Idefics3ForConditionalGeneration": (
        "Idefics3Config",
        {**IDEFICS, "text_config": {"model_type": "llama", **TEXT}, "tie_word_embeddings": False},
        "Idefics3ImageProcessor",
    ),
    "LlavaForConditionalGeneration": (
        "LlavaConfig",
        {
            "image_token_id": IMAGE_ID,
            "vision_config": {"model_type": "siglip_vision_model", **VISION, "vision_use_head": False},
            "vision_feature_select_strategy": "full",
            "vision_feature_layer": -1,
            "text_config": {"model_type": "llama", **TEXT},
            "tie_word_embeddings": False,
        },
        "SiglipImageProcessor",
    ),
}


def model(architecture: str) -> PreTrainedModel:
    """A random float32 model in evaluation mode, always the same.

    One whose output layer is its own writes ASCII: the stock runner's binding takes no piece of a character.
    """
    config_class, settings, _ = MODELS[architecture]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = getattr(transformers, architecture)(getattr(transformers, config_class)(**settings))
    if not made.config.tie_word_embeddings:
        texts = [tokenizer().decode([token]) for token in range(VOCABULARY)]
        made.lm_head.weight.data[[not text.isascii() for text in texts]] = 0
    return made.eval().requires_grad_(False)


def save(folder: Path, architecture: str) -> Path:
    """Write the model, its tokenizer and its image processor's file into ``folder`` and give the folder back."""
    model(architecture).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor(MODELS[architecture][2])))
    return folder


def preprocessor(kind: str) -> dict[str, object]:
    """The file of an image processor, of which those after Idefics 3 cut large images into tiles by default."""
    steps = {"image_processor_type": kind, "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    if kind == "SiglipImageProcessor":
        return {**steps, "size": {"height": PIXELS, "width": PIXELS}}
    edge = {"longest_edge": PIXELS}
    return {**steps, "do_image_splitting": True, "size": edge, "max_image_size": edge}


def tokenizer() -> PreTrainedTokenizerFast:
    """The byte-level tokenizer of ``tests/tiny.py`` with the tokens around images."""
    found = tiny.tokenizer(300)
    found.add_special_tokens({"additional_special_tokens": list(TOKENS)})
    found.chat_template = CHAT_TEMPLATE
    return found
