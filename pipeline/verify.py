"""Stage: run the package that was just written against what eager PyTorch said."""

from __future__ import annotations

from pathlib import Path

from pipeline.config import CheckSettings
from pipeline.record import Recorded
from runners.check import Progress
from runners.check_command import replay
from runners.check_report import CheckReport, Limits, QuantizedLimits, write_report
from runners.manifest import REPORT_DIRECTORY
from runners.package import open_package

# For steps this short a second thread takes nearly as much processor time again, and brings the rounding of a sum
# shared out among threads as they come free: on one, a build's report repeats.
_THREADS = 1


def verify(directory: Path, settings: CheckSettings, recorded: Recorded, progress: Progress) -> CheckReport:
    """Check the package in ``directory`` as ``pteline check`` does, over the whole vocabulary; write the report."""
    quantized = QuantizedLimits(**settings.quantized.model_dump())
    unquantized = Limits(**settings.unquantized.model_dump())
    package = open_package(directory)
    report = replay(package, recorded.goldens, quantized, unquantized, recorded.full, _THREADS, progress)
    (directory / REPORT_DIRECTORY).mkdir(exist_ok=True)
    write_report(report, directory / REPORT_DIRECTORY / "check.json")
    return report
