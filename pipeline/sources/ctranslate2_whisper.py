"""A Whisper model of CTranslate2's layout, by the names that transformers' WhisperForConditionalGeneration has for it.

D model width, F feed-forward width, M mel bins, A audio positions, T text positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pipeline.sources.ctranslate2 import Array, Ctranslate2Model
from runners.errors import UserError

SPEC = "WhisperSpec"
GELU = 3  # the exact one, by the error function, as CTranslate2 numbers activations
PROJECTION, EMBEDDINGS = "decoder/projection/weight", "decoder/embeddings/weight"
HEADS = ("encoder/num_heads", "decoder/num_heads")
# settings that change what the model computes: the values transformers' class has built in
FIXED = {
    "decoder/activation": GELU,
    "decoder/alibi": 0,
    "decoder/pre_norm": 1,
    "decoder/scale_embeddings": 0,
    "decoder/start_from_zero_embedding": 0,
}
# hints for word timestamps; they change no logit, and the folder's config.json has the heads too
IGNORED = ("decoder/alignment_heads", "decoder/alignment_layer")
SHOWN = 8  # names in a message


@dataclass(frozen=True)
class Sizes:
    """What the shapes of a model's variables say."""

    width: int  # D
    mel_bins: int  # M
    audio_positions: int  # A
    text_positions: int  # T
    vocabulary: int  # V
    encoder_layers: int
    decoder_layers: int
    encoder_heads: int
    decoder_heads: int
    encoder_feed_forward: int
    decoder_feed_forward: int


@dataclass(frozen=True)
class _Row:
    """Where a variable goes: equal slices of its first dimension, None for a slice of zeros that has no name."""

    shape: tuple[int, ...]
    targets: tuple[str | None, ...]


def sizes(model: Ctranslate2Model) -> Sizes:
    """The sizes of ``model``.

    Raises:
        UserError: it is no Whisper model, computes something else than Whisper, or a variable needed here is missing.
    """
    if model.spec != SPEC:
        raise UserError(f"{model.path}: a CTranslate2 {model.spec}; expected {SPEC}: no other one can be converted")
    _check_settings(model)
    conv = _shape(model, "encoder/conv1/weight", 3)
    vocabulary, _ = _shape(model, EMBEDDINGS, 2)
    return Sizes(
        width=conv[0],
        mel_bins=conv[1],
        audio_positions=_shape(model, "encoder/position_encodings/encodings", 2)[0],
        text_positions=_shape(model, "decoder/position_encodings/encodings", 2)[0],
        vocabulary=vocabulary,
        encoder_layers=_layers(model, "encoder"),
        decoder_layers=_layers(model, "decoder"),
        encoder_heads=_setting(model, HEADS[0]),
        decoder_heads=_setting(model, HEADS[1]),
        encoder_feed_forward=_shape(model, "encoder/layer_0/ffn/linear_0/weight", 2)[0],
        decoder_feed_forward=_shape(model, "decoder/layer_0/ffn/linear_0/weight", 2)[0],
    )


def state_dict(model: Ctranslate2Model, found: Sizes) -> dict[str, Array]:
    """Each weight of WhisperForConditionalGeneration but the tied ``proj_out.weight``, in the type it is stored in.

    Raises:
        UserError: a variable is missing, of no use, of another shape than ``found`` makes it, of an integer type
            (quantized), or a key bias is not zero.
    """
    table = _table(found)
    known = {*table, *FIXED, *HEADS, *IGNORED}
    if missing := table.keys() - model.variables.keys():
        raise UserError(f"{model.path}: lacks {len(missing)} variables of a Whisper model: {_some(missing)}")
    if unused := model.variables.keys() - known:
        raise UserError(f"{model.path}: {len(unused)} variables have no place in a Whisper model: {_some(unused)}")
    if model.aliases != {PROJECTION: EMBEDDINGS}:
        raise UserError(
            f"{model.path}: aliases {model.aliases}; expected only {PROJECTION} for {EMBEDDINGS}: Whisper's output "
            "layer is its embedding"
        )
    weights: dict[str, Array] = {}
    for name, row in table.items():
        weights.update(_slices(model, name, row))
    return weights


def _slices(model: Ctranslate2Model, name: str, row: _Row) -> dict[str, Array]:
    array = model.variables[name]
    if array.shape != row.shape or array.dtype.kind != "f":
        raise UserError(
            f"{model.path}: {name} is {array.dtype} {list(array.shape)}; expected float {list(row.shape)}; a quantized "
            "model has to be converted anew with float16 or float32 weights"
        )
    slices: dict[str, Array] = {}
    for target, part in zip(row.targets, np.split(array, len(row.targets)), strict=True):
        if target is not None:
            slices[target] = part
        elif part.any():
            raise UserError(f"{model.path}: {name} has a bias for keys; Whisper's keys have none: not such a model")
    return slices


def _table(found: Sizes) -> dict[str, _Row]:
    width = found.width
    rows = {
        "encoder/conv1/weight": _Row((width, found.mel_bins, 3), ("model.encoder.conv1.weight",)),
        "encoder/conv1/bias": _Row((width,), ("model.encoder.conv1.bias",)),
        "encoder/conv2/weight": _Row((width, width, 3), ("model.encoder.conv2.weight",)),
        "encoder/conv2/bias": _Row((width,), ("model.encoder.conv2.bias",)),
        EMBEDDINGS: _Row((found.vocabulary, width), ("model.decoder.embed_tokens.weight",)),
    }
    halves = (
        ("encoder", found.encoder_layers, found.encoder_feed_forward, found.audio_positions),
        ("decoder", found.decoder_layers, found.decoder_feed_forward, found.text_positions),
    )
    for half, layers, feed_forward, positions in halves:
        positional = f"model.{half}.embed_positions.weight"
        rows[f"{half}/position_encodings/encodings"] = _Row((positions, width), (positional,))
        rows |= _norm(f"{half}/layer_norm", f"model.{half}.layer_norm", width)
        for index in range(layers):
            layer = (f"{half}/layer_{index}", f"model.{half}.layers.{index}")
            rows |= _self_attention(*layer, width) | _feed_forward(*layer, width, feed_forward)
            if half == "decoder":
                rows |= _cross_attention(*layer, width)
    return rows


def _self_attention(source: str, target: str, width: int) -> dict[str, _Row]:
    attention, name = f"{source}/self_attention", f"{target}.self_attn"
    return {
        **_norm(f"{attention}/layer_norm", f"{target}.self_attn_layer_norm", width),
        **_linear(f"{attention}/linear_0", (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj"), width, width),
        **_linear(f"{attention}/linear_1", (f"{name}.out_proj",), width, width),
    }


def _cross_attention(source: str, target: str, width: int) -> dict[str, _Row]:
    attention, name = f"{source}/attention", f"{target}.encoder_attn"
    return {
        **_norm(f"{attention}/layer_norm", f"{target}.encoder_attn_layer_norm", width),
        **_linear(f"{attention}/linear_0", (f"{name}.q_proj",), width, width),
        **_linear(f"{attention}/linear_1", (f"{name}.k_proj", f"{name}.v_proj"), width, width),
        **_linear(f"{attention}/linear_2", (f"{name}.out_proj",), width, width),
    }


def _feed_forward(source: str, target: str, width: int, inner: int) -> dict[str, _Row]:
    return {
        **_norm(f"{source}/ffn/layer_norm", f"{target}.final_layer_norm", width),
        **_linear(f"{source}/ffn/linear_0", (f"{target}.fc1",), inner, width),
        **_linear(f"{source}/ffn/linear_1", (f"{target}.fc2",), width, inner),
    }


def _norm(source: str, target: str, width: int) -> dict[str, _Row]:
    return {
        f"{source}/gamma": _Row((width,), (f"{target}.weight",)),
        f"{source}/beta": _Row((width,), (f"{target}.bias",)),
    }


def _linear(source: str, targets: tuple[str, ...], outputs: int, inputs: int) -> dict[str, _Row]:
    """One linear layer, or several fused along their outputs; a projection of keys has no bias in transformers."""
    biases = tuple(None if name.endswith(".k_proj") else f"{name}.bias" for name in targets)
    return {
        f"{source}/weight": _Row((outputs * len(targets), inputs), tuple(f"{name}.weight" for name in targets)),
        f"{source}/bias": _Row((outputs * len(targets),), biases),
    }


def _check_settings(model: Ctranslate2Model) -> None:
    for name, expected in FIXED.items():
        value = _setting(model, name)
        if value != expected:
            raise UserError(f"{model.path}: {name} is {value}, and Whisper in transformers has {expected} built in")


def _setting(model: Ctranslate2Model, name: str) -> int:
    _shape(model, name, 0)
    return int(model.variables[name])


def _shape(model: Ctranslate2Model, name: str, rank: int) -> tuple[int, ...]:
    array = model.variables.get(name)
    if array is None or array.ndim != rank:
        has = "is missing" if array is None else f"has shape {list(array.shape)}"
        raise UserError(f"{model.path}: variable {name} {has}; expected {rank} dimensions in a Whisper model")
    return tuple(array.shape)


def _layers(model: Ctranslate2Model, half: str) -> int:
    count = 0
    while f"{half}/layer_{count}/ffn/linear_0/weight" in model.variables:
        count += 1
    return count


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
    return ", ".join(ordered[:SHOWN]) + more
