"""Tiny random Whisper models as CTranslate2 writes them: its binary layout and its names, and a tokenizer beside it."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import WhisperConfig, WhisperForConditionalGeneration

SPECIAL = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    "<|en|>",
    "<|de|>",
    "<|translate|>",
    "<|transcribe|>",
    "<|startofprev|>",
    "<|notimestamps|>",
)
NUMBERS = {"float32": 0, "int8": 1, "int16": 2, "int32": 3, "float16": 4, "bfloat16": 5}
ALIASES = {"decoder/projection/weight": "decoder/embeddings/weight"}

Variables = dict[str, np.ndarray]


def model(vocabulary: int = 280) -> WhisperForConditionalGeneration:
    """Encoder and decoder differ in layers, heads and feed-forward width, so that a mix-up cannot pass."""
    config = WhisperConfig(
        vocab_size=vocabulary,
        num_mel_bins=4,
        d_model=8,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=4,
        encoder_ffn_dim=12,
        decoder_ffn_dim=16,
        max_source_positions=10,
        max_target_positions=14,
        pad_token_id=256,
        bos_token_id=256,
        eos_token_id=256,
        decoder_start_token_id=257,
    )
    torch.manual_seed(0)
    made = WhisperForConditionalGeneration(config).eval().requires_grad_(False)
    for weight in made.parameters():  # biases and norms too: as they are made, they are all alike
        weight.copy_(torch.randn_like(weight).half())
    return made


def variables(source: WhisperForConditionalGeneration) -> Variables:
    """The model's weights under CTranslate2's names, float16."""
    state = {name: tensor.half().numpy() for name, tensor in source.state_dict().items()}
    config = source.config
    found: Variables = {
        "encoder/num_heads": np.int16(config.encoder_attention_heads),
        "decoder/num_heads": np.int16(config.decoder_attention_heads),
        "decoder/activation": np.int8(3),
        "decoder/alibi": np.int8(0),
        "decoder/pre_norm": np.int8(1),
        "decoder/scale_embeddings": np.int8(0),
        "decoder/start_from_zero_embedding": np.int8(0),
        "decoder/alignment_heads": np.int16(1),
        "decoder/alignment_layer": np.int16(-1),
        "decoder/embeddings/weight": state["model.decoder.embed_tokens.weight"],
    }
    for name in ("conv1", "conv2"):
        for kind in ("weight", "bias"):
            found[f"encoder/{name}/{kind}"] = state[f"model.encoder.{name}.{kind}"]
    for half, layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        found[f"{half}/position_encodings/encodings"] = state[f"model.{half}.embed_positions.weight"]
        _norm(found, state, f"{half}/layer_norm", f"model.{half}.layer_norm")
        for index in range(layers):
            place, name = f"{half}/layer_{index}", f"model.{half}.layers.{index}"
            _norm(found, state, f"{place}/self_attention/layer_norm", f"{name}.self_attn_layer_norm")
            _norm(found, state, f"{place}/ffn/layer_norm", f"{name}.final_layer_norm")
            _fused(found, state, f"{place}/self_attention/linear_0", f"{name}.self_attn", "qkv")
            _linear(found, state, f"{place}/self_attention/linear_1", f"{name}.self_attn.out_proj")
            _linear(found, state, f"{place}/ffn/linear_0", f"{name}.fc1")
            _linear(found, state, f"{place}/ffn/linear_1", f"{name}.fc2")
            if half == "decoder":
                _norm(found, state, f"{place}/attention/layer_norm", f"{name}.encoder_attn_layer_norm")
                _fused(found, state, f"{place}/attention/linear_0", f"{name}.encoder_attn", "q")
                _fused(found, state, f"{place}/attention/linear_1", f"{name}.encoder_attn", "kv")
                _linear(found, state, f"{place}/attention/linear_2", f"{name}.encoder_attn.out_proj")
    return found


def _norm(found: Variables, state: Variables, target: str, source: str) -> None:
    found[f"{target}/gamma"], found[f"{target}/beta"] = state[f"{source}.weight"], state[f"{source}.bias"]


def _linear(found: Variables, state: Variables, target: str, source: str) -> None:
    found[f"{target}/weight"], found[f"{target}/bias"] = state[f"{source}.weight"], state[f"{source}.bias"]


def _fused(found: Variables, state: Variables, target: str, attention: str, letters: str) -> None:
    weights = [state[f"{attention}.{letter}_proj.weight"] for letter in letters]
    zeros = np.zeros(weights[0].shape[0], np.float16)
    found[f"{target}/weight"] = np.concatenate(weights)
    found[f"{target}/bias"] = np.concatenate(
        [state.get(f"{attention}.{letter}_proj.bias", zeros) for letter in letters]
    )


def binary(
    content: Mapping[str, np.ndarray],
    aliases: Mapping[str, str] = ALIASES,
    *,
    spec: str = "WhisperSpec",
    version: int = 6,
    types: Mapping[str, str] | None = None,
) -> bytes:
    """A ``model.bin``. ``types`` names the type of an array that numpy has no name for."""
    out = struct.pack("<I", version) + _string(spec) + struct.pack("<II", 3, len(content))
    for name, value in content.items():
        number = NUMBERS[(types or {}).get(name, value.dtype.name)]
        out += _string(name) + struct.pack(f"<B{value.ndim}I", value.ndim, *value.shape)
        out += struct.pack("<BI", number, value.nbytes) + value.tobytes()
    out += struct.pack("<I", len(aliases))
    return out + b"".join(_string(name) + _string(target) for name, target in aliases.items())


def _string(text: str) -> bytes:
    return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"


def save_tokenizer(path: Path) -> None:
    """A byte-level tokenizer of 256 bytes and Whisper's special tokens after them."""
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    made.save(str(path))


def save_folder(folder: Path, source: WhisperForConditionalGeneration) -> Path:
    """``model.bin``, ``config.json`` (CTranslate2's own) and ``tokenizer.json``."""
    folder.mkdir()
    (folder / "model.bin").write_bytes(binary(variables(source)))
    (folder / "config.json").write_text('{"suppress_ids": [1, 2], "suppress_ids_begin": [3], "lang_ids": [9]}')
    save_tokenizer(folder / "tokenizer.json")
    return folder
