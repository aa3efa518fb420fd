"""Stage: run the package that was just written against what eager PyTorch said."""

from __future__ import annotations

from pathlib import Path

from pipeline.config import CheckSettings
from pipeline.record import Recorded
from runners.check import check
from runners.check_report import CheckReport, Limits, write_report
from runners.manifest import REPORT_DIRECTORY
from runners.package import open_package
from runners.session import Session


def verify(directory: Path, settings: CheckSettings, recorded: Recorded) -> CheckReport:
    """Check the package in ``directory`` as ``pteline check`` does, over the whole vocabulary, and write its report there."""
    session = Session.open(open_package(directory))
    report = check(
        session,
        recorded.goldens,
        Limits(**settings.quantized.model_dump()),
        Limits(**settings.unquantized.model_dump()),
        recorded.full,
    )
    (directory / REPORT_DIRECTORY).mkdir(exist_ok=True)
    write_report(report, directory / REPORT_DIRECTORY / "check.json")
    return report
