"""What eager PyTorch makes of the inputs of a check: models without a cache, one call each.

S tokens of a call, D width, V vocabulary, C labels, R recorded rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from pipeline.artifacts import Loaded, Quantized
from pipeline.quantization.reference import reference_of
from pipeline.record import Recorded
from runners.cases import CaseKind, GoldenCase, rows_of
from runners.check import FullLogits
from runners.goldens import Goldens

MOST_ROWS = 16  # of logits: each has the width of the vocabulary


@dataclass(frozen=True)
class Case:
    """The inputs of one call."""

    name: str
    text: str  # what they were made of, for people
    inputs: Mapping[str, torch.Tensor]  # name in the program -> tensor
    rows: torch.Tensor  # int64 [R]: rows of the output that are recorded


@dataclass(frozen=True)
class Output:
    """The output that is recorded."""

    field: str  # of the model's own output
    name: str  # in the program
    kind: CaseKind


def record_cases(
    loaded: Loaded, quantized: Quantized, cases: Sequence[Case], arguments: Mapping[str, str], output: Output
) -> Recorded:
    """Run both models on every case.

    Args:
        loaded: the source's model.
        quantized: the package's.
        cases: the inputs.
        arguments: name of an input in the program -> argument of the model's forward.
        output: what is recorded.
    """
    reference = reference_of(quantized.model)
    ours = [_rows(reference, case, arguments, output.field) for case in cases]
    del reference
    theirs = [_rows(loaded.model, case, arguments, output.field) for case in cases]
    found = tuple(
        GoldenCase(
            name=case.name,
            text=case.text,
            method="forward",
            output=output.name,
            kind=output.kind,
            inputs=case.inputs,
            rows=case.rows,
            quantized=our,
            unquantized=their,
        )
        for case, our, their in zip(cases, ours, theirs, strict=True)
    )
    return Recorded(Goldens((), None, found), FullLogits())


def identity_of(cases: Sequence[Case]) -> str:
    """A digest of all inputs: recordings of cases with the same one are the same."""
    digest = hashlib.sha256()
    for case in cases:
        digest.update(case.name.encode())
        for name, tensor in {**case.inputs, "": case.rows}.items():
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def spread_rows(count: int, most: int = MOST_ROWS) -> torch.Tensor:
    """At most ``most`` of ``count`` rows, evenly, the first and the last among them: int64 ``[R]``."""
    return torch.linspace(0, count - 1, min(count, most)).round().long()


def _rows(model: PreTrainedModel, case: Case, arguments: Mapping[str, str], field: str) -> torch.Tensor:
    with torch.inference_mode():
        found = model(**{arguments[name]: tensor for name, tensor in case.inputs.items()})
    return rows_of(getattr(found, field), case.rows).clone()
