"""Replay golden cases: call the program with each one's inputs, and compare the recorded rows of its output.

R recorded rows, W width of a row (D of hidden states; V or C of logits).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from runners.cases import GoldenCase, rows_of
from runners.check_report import CaseComparison, CaseReport
from runners.errors import UserError
from runners.pooling import pool
from runners.preprocessing import Pooling

TOP = 5


class Callee(Protocol):
    """What can be checked: a loaded program without a cache."""

    def call(self, inputs: dict[str, torch.Tensor], method: str = "forward") -> dict[str, torch.Tensor]:
        """Run a method; the outputs by name."""


def replay_cases(
    program: Callee, cases: Sequence[GoldenCase], pooling: Pooling | None, progress: Callable[[str], None]
) -> tuple[CaseReport, ...]:
    """Run every case on one loaded program, one after another.

    Raises:
        UserError: the program lacks a case's method or output, or gives another shape.
    """
    reports = []
    for number, case in enumerate(cases, 1):
        progress(f"case {number} of {len(cases)} ({case.name})")
        reports.append(_report(case, run_case(program, case), pooling))
    return tuple(reports)


def cases_repeat(program: Callee, cases: Sequence[GoldenCase]) -> bool:
    """Whether the first case gives the same output, bit by bit, after another one. On one thread: see ``repeats``."""
    before = run_case(program, cases[0])
    run_case(program, cases[:2][-1])
    return bool(torch.equal(run_case(program, cases[0]).view(torch.int32), before.view(torch.int32)))


def run_case(program: Callee, case: GoldenCase) -> torch.Tensor:
    """The rows of a case as the program gives them, float32 ``[R, W]``.

    Raises:
        UserError: the program has no such output, or one of another shape.
    """
    output = program.call(dict(case.inputs), case.method).get(case.output)
    if output is None:
        raise UserError(f"case {case.name}: the program's method {case.method} has no output {case.output}")
    rows = output.numel() // output.shape[-1]
    if output.shape[-1] != case.quantized.shape[-1] or int(case.rows.max()) >= rows:
        raise UserError(
            f"case {case.name}: the program's {case.output} is {list(output.shape)}, the goldens hold "
            f"{list(case.quantized.shape)} of it, up to row {int(case.rows.max())}"
        )
    return rows_of(output, case.rows).clone()


def _report(case: GoldenCase, found: torch.Tensor, pooling: Pooling | None) -> CaseReport:
    return CaseReport(
        name=case.name,
        text=case.text,
        inputs={name: list(tensor.shape) for name, tensor in case.inputs.items()},
        finite=bool(torch.isfinite(found).all()),
        quantized=compare_rows(case, found, case.quantized, pooling),
        unquantized=compare_rows(case, found, case.unquantized, pooling),
    )


def compare_rows(
    case: GoldenCase, found: torch.Tensor, wanted: torch.Tensor, pooling: Pooling | None
) -> CaseComparison:
    """Compare float32 ``[R, W]`` with a reference's."""
    difference = (found - wanted).abs()
    ranked = case.kind == "logits"
    return CaseComparison(
        rows=found.shape[0],
        max_output_difference=float(difference.max()),
        mean_output_difference=float(difference.mean()),
        equal_top1=_equal_top(found, wanted, 1) if ranked else None,
        equal_top5=_equal_top(found, wanted, TOP) if ranked else None,
        cosine=_cosine(found, wanted, pooling) if not ranked and pooling is not None else None,
    )


def _equal_top(found: torch.Tensor, wanted: torch.Tensor, count: int) -> int:
    """Rows whose ``count`` largest values stand in the same places, in any order."""
    count = min(count, found.shape[-1])
    ours, theirs = (rows.topk(count).indices.sort().values for rows in (found, wanted))
    return int((ours == theirs).all(-1).sum())


def _cosine(found: torch.Tensor, wanted: torch.Tensor, pooling: Pooling) -> float:
    """Between the two embeddings that the rows, those of the text's tokens, are pooled to."""
    present = torch.ones(1, found.shape[0], dtype=torch.int64)
    ours, theirs = (pool(rows.unsqueeze(0).double(), present, pooling) for rows in (found, wanted))
    return float(torch.nn.functional.cosine_similarity(ours, theirs).clamp(-1, 1))
