"""Tiny random models with a real tokenizer, saved as transformers saves any model: they stand in for checkpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import gguf
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TRAINING_TEXT = (
    "The quick brown fox jumps over the lazy dog while seven wizards brew a jar of fine, sparkling ginger ale. "
    "Every morning the baker opened her shop, counted the loaves, and wrote the number on a slate by the door; "
    "each evening she rubbed it out again and wondered whether tomorrow would bring more rain than customers."
)


@dataclass(frozen=True)
class Shape:
    """The sizes of a tiny Llama. ``vocabulary`` is at least 259 (the bytes and the special tokens)."""

    layers: int = 2
    hidden: int = 64
    intermediate: int = 128
    heads: int = 4
    kv_heads: int = 2
    vocabulary: int = 300
    max_positions: int = 256
    tied: bool = True


def tokenizer(vocabulary: int = 300) -> PreTrainedTokenizerFast:
    """A byte-level BPE of exactly ``vocabulary`` tokens: it encodes and gives back any text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator([TRAINING_TEXT], trainer)
    assert bpe.get_vocab_size() == vocabulary
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<|im_start|>", eos_token="<|im_end|>", unk_token="<|endoftext|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def llama_config(shape: Shape = Shape()) -> LlamaConfig:
    """The configuration that belongs to ``shape``."""
    return LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=shape.tied,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,  # large enough for logits that differ clearly, so that greedy choices are no ties
    )


def llama(shape: Shape = Shape(), seed: int = 0) -> LlamaForCausalLM:
    """A random float32 Llama in evaluation mode, without gradients. The global random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(llama_config(shape))
    return model.eval().requires_grad_(False)


def save_llama(folder: Path, shape: Shape = Shape(), seed: int = 0, *, with_tokenizer: bool = True) -> Path:
    """Write a tiny Llama (and its tokenizer) into ``folder`` and give the folder back."""
    llama(shape, seed).save_pretrained(folder)
    if with_tokenizer:
        tokenizer(shape.vocabulary).save_pretrained(folder)
    return folder


def save_gguf(path: Path, shape: Shape = Shape(), seed: int = 0, *, with_tokenizer: bool = True) -> Path:
    """Write the same tiny Llama as one float32 GGUF file, as llama.cpp's converter does, and give the path back."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_license("MIT")
    writer.add_context_length(shape.max_positions)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.hidden // shape.heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(shape.vocabulary)
    if with_tokenizer:
        _add_tokenizer(writer, shape.vocabulary)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, shape.layers)
    for name, weight in llama(shape, seed).state_dict().items():
        if not (shape.tied and name == "lm_head.weight"):
            writer.add_tensor(names.get_name(name, (".weight",)), _as_llama_cpp(name, weight, shape).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _as_llama_cpp(name: str, weight: torch.Tensor, shape: Shape) -> torch.Tensor:
    """llama.cpp interleaves the two rotary halves of each head in query and key rows."""
    heads = shape.heads if ".q_proj." in name else shape.kv_heads
    if ".q_proj." not in name and ".k_proj." not in name:
        return weight
    half = weight.shape[0] // heads // 2
    return weight.view(heads, 2, half, weight.shape[1]).transpose(1, 2).reshape(weight.shape).contiguous()


def _add_tokenizer(writer: gguf.GGUFWriter, vocabulary: int) -> None:
    model = json.loads(tokenizer(vocabulary).backend_tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in SPECIAL_TOKENS else normal for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
