"""Tiny random models without a cache, saved as transformers saves them, with what their tasks need beside them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedModel, PreTrainedTokenizerFast

MAX, PIXELS, LABELS, VOCABULARY = 40, 32, 7, 64
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # ids 0 to 4
WORDS = [f"w{number}" for number in range(VOCABULARY - len(SPECIAL))]  # ids 5 to 63
TEXTS = ["w0", "w1 w2 [MASK] w3", "w7 w8 w9 w10 [MASK] w11 w12 [MASK] w13"]

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": MAX,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # large enough for outputs that differ clearly
}
_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "image_size": PIXELS,
    "patch_size": 8,
    "initializer_range": 0.3,
    "num_labels": LABELS,
}
_DISTILBERT = {
    "vocab_size": VOCABULARY,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 48,
    "max_position_embeddings": MAX,
    "initializer_range": 0.3,
}
_MODERNBERT = {
    **{name: value for name, value in _TEXT.items() if name != "initializer_range"},
    "initializer_range": 0.3,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "cls_token_id": 2,
    "sep_token_id": 3,
    "global_attn_every_n_layers": 2,  # the other layer sees 4 tokens to each side
    "local_attention": 8,
}
MODELS = {  # architecture -> its config class and settings
    "BertModel": ("BertConfig", _TEXT),
    "BertForMaskedLM": ("BertConfig", _TEXT),
    "DistilBertForMaskedLM": ("DistilBertConfig", _DISTILBERT),
    "AlbertForMaskedLM": ("AlbertConfig", {**_TEXT, "embedding_size": 16}),
    "ModernBertModel": ("ModernBertConfig", _MODERNBERT),
    "RobertaModel": ("RobertaConfig", {**_TEXT, "pad_token_id": 1}),
    "ViTForImageClassification": ("ViTConfig", _VISION),
    "DeiTForImageClassification": ("DeiTConfig", _VISION),
}


def model(architecture: str) -> PreTrainedModel:
    """A random float32 model in evaluation mode, always the same."""
    config_class, settings = MODELS[architecture]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = getattr(transformers, architecture)(getattr(transformers, config_class)(**settings))
    return made.eval().requires_grad_(False)


def save(folder: Path, architecture: str, *, with_tokenizer: bool = True) -> Path:
    """Write the model and what belongs to it into ``folder`` and give the folder back."""
    made = model(architecture)
    made.save_pretrained(folder)
    if hasattr(made.config, "image_size"):
        preprocessor = {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True,
            "size": {"height": PIXELS, "width": PIXELS},
            "do_normalize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    elif with_tokenizer:
        tokenizer().save_pretrained(folder)
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word; every text stands between [CLS] and [SEP]."""
    level = Tokenizer(models.WordLevel({token: i for i, token in enumerate([*SPECIAL, *WORDS])}, unk_token="[UNK]"))
    level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    level.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL}
    return PreTrainedTokenizerFast(tokenizer_object=level, **names)


def save_image(path: Path, seed: int = 0) -> Path:
    """Write an image of noise, of another size than the models take."""
    noise = np.random.default_rng(seed).integers(0, 256, (24, 48, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    return path
