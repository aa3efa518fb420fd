"""Golden cases: one call of a method each, of a program that keeps nothing between calls.

S tokens of a call, D width, V vocabulary, C labels, R recorded rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

CaseKind = Literal["hidden", "logits"]

INPUTS, ROWS = "inputs", "rows"


@dataclass(frozen=True)
class GoldenCase:
    """Inputs of a call, and what eager PyTorch made of them."""

    name: str  # "0", "1", … or "to_the_end", "padded", "random 0"
    text: str  # what the inputs were made of, for people
    method: str
    output: str  # name of the output that is compared
    kind: CaseKind  # "hidden": states that are pooled to an embedding; "logits": scores whose order counts
    inputs: Mapping[str, torch.Tensor]
    rows: torch.Tensor  # int64 [R]: which rows of the output [1, S, …] are recorded; of an output [1, C] the only one
    quantized: torch.Tensor  # float32 [R, D, V or C]: eager execution of the package's weights
    unquantized: torch.Tensor  # float32 likewise: of the source's weights


@dataclass(frozen=True)
class CaseHeader:
    """What the metadata of a file of goldens holds of a case beside its tensors."""

    name: str
    text: str
    method: str
    output: str
    kind: CaseKind
    inputs: tuple[str, ...]


def rows_of(output: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The recorded rows of a method's output: float32 ``[R, D]`` of ``[1, S, D]``, ``[1, C]`` of ``[1, C]``."""
    flat = output.reshape(-1, output.shape[-1]).float()
    return flat[rows]


def header_of(case: GoldenCase) -> CaseHeader:
    """What goes to the metadata."""
    return CaseHeader(case.name, case.text, case.method, case.output, case.kind, tuple(case.inputs))


def tensors_of(case: GoldenCase) -> Iterator[tuple[str, torch.Tensor]]:
    """The case's tensors under their names in the file."""
    prefix = f"case/{case.name}"
    for name, tensor in case.inputs.items():
        yield f"{prefix}/{INPUTS}/{name}", tensor
    yield f"{prefix}/{ROWS}", case.rows
    yield f"{prefix}/quantized", case.quantized
    yield f"{prefix}/unquantized", case.unquantized
