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
    group_multiple: int | None  # group sizes that the backend takes are multiples of this; None: it takes no groups
    scales: Literal["minmax", "hqq", "imatrix"]  # default way to find the scales
    backends: tuple[str, ...]  # those whose partitioner takes the layer; any other would unpack the weight at each step

    @property
    def grouped(self) -> bool:
        """Whether a group size applies."""
        return self.group_multiple is not None


@dataclass(frozen=True)
class EmbeddingScheme:
    """How an embedding table is stored."""

    bits: Literal[4, 8]


LINEAR_SCHEMES: dict[str, LinearScheme | None] = {
    "none": None,
    "8da4w": LinearScheme(4, "int8_dynamic", group_size=32, group_multiple=32, scales="imatrix", backends=("xnnpack",)),
    "8da8w": LinearScheme(
        8, "int8_dynamic", group_size=None, group_multiple=None, scales="minmax", backends=("xnnpack",)
    ),
    "4w": LinearScheme(4, "float32", group_size=None, group_multiple=None, scales="minmax", backends=()),
    "8w": LinearScheme(8, "float32", group_size=None, group_multiple=None, scales="minmax", backends=()),
}

EMBEDDING_SCHEMES: dict[str, EmbeddingScheme | None] = {
    "none": None,
    "8w": EmbeddingScheme(bits=8),
    "4w": EmbeddingScheme(bits=4),
}


def is_taken(linear: str, backend: str) -> bool:
    """Whether ``backend`` takes layers of a linear scheme; layers without one it always does."""
    scheme = LINEAR_SCHEMES[linear]
    return scheme is None or backend in scheme.backends
