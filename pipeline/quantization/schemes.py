"""Quantization schemes as rows of data. The code that applies a row (``apply.py``) never names one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LinearScheme:
    """How the weight of a linear layer is stored, and whether its input is quantized at run time."""

    weight_bits: Literal[4, 8]
    activation: Literal["float32", "int8_dynamic"]  # int8_dynamic: a scale and zero point a token
    group_size: int | None  # default input features a scale; None: one scale an output channel
    grouped: bool  # whether the backend takes a group size at all


@dataclass(frozen=True)
class EmbeddingScheme:
    """How an embedding table is stored."""

    bits: Literal[4, 8]


LINEAR_SCHEMES: dict[str, LinearScheme | None] = {
    "none": None,
    "8da4w": LinearScheme(weight_bits=4, activation="int8_dynamic", group_size=32, grouped=True),
    "8da8w": LinearScheme(weight_bits=8, activation="int8_dynamic", group_size=None, grouped=False),
    "4w": LinearScheme(weight_bits=4, activation="float32", group_size=None, grouped=False),
    "8w": LinearScheme(weight_bits=8, activation="float32", group_size=None, grouped=False),
}

EMBEDDING_SCHEMES: dict[str, EmbeddingScheme | None] = {
    "none": None,
    "8w": EmbeddingScheme(bits=8),
    "4w": EmbeddingScheme(bits=4),
}
