"""This project's packages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks import weights
from benchmarks.commands import python
from benchmarks.errors import PeerError
from benchmarks.peer import Ready, Workspace
from benchmarks.records import BuildCost
from runners.errors import UserError
from runners.manifest import Manifest, StageFigure
from runners.package import open_package

_CHECKING = ("draft", "record", "check")  # the stages that hold a package against eager PyTorch
_SETTING = "quantize."  # begins what the manifest says of a class of weights


@dataclass(frozen=True)
class Pteline:
    """One package, which the run does not build."""

    path: Path
    long_positions: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """The directory's name, which is the package's."""
        return self.path.resolve().name

    @property
    def positions(self) -> tuple[int, ...] | None:
        """Those of the run; of a package with a long cache, its own."""
        return self.long_positions

    def prepare(self, workspace: Workspace) -> Ready:
        """Read the manifest."""
        try:
            package = open_package(self.path)
        except UserError as error:
            raise PeerError(str(error)) from error
        manifest = package.manifest
        if manifest.cache is None:
            raise PeerError(f"{self.path}: the package has no cache: it decodes no text")
        held = weights.of_pte(package.program_path, _describe(manifest))
        each = manifest.cache.bytes // manifest.cache.max_length
        command = python("benchmarks.engines.pteline")
        return Ready(command, str(self.path.resolve()), held, each, _build(manifest.timings))


def _describe(manifest: Manifest) -> str:
    """The schemes of the classes of weights: ``linear 8da4w, group 32; lm_head 8da8w``."""
    found = {name: entry.split(", ") for name, entry in manifest.quantization.items() if name.startswith(_SETTING)}
    schemes = {
        name.removeprefix(_SETTING): [part for part in parts if part == parts[0] or part.startswith("group")]
        for name, parts in found.items()
    }
    return "; ".join(f"{name} {', '.join(parts)}" for name, parts in schemes.items()) or "32 bits a weight"


def _build(timings: dict[str, StageFigure]) -> BuildCost:
    stages = timings.values()
    kept = [name for name, figure in timings.items() if figure.cached]
    fetched = f"; only fetched from the stage cache: {', '.join(kept)}" if kept else ""
    written = sum(figure.cpu_seconds for name, figure in timings.items() if name not in _CHECKING)
    note = f"{written:.0f} s until the package was written, then its check" if "check" in timings else "without a check"
    return BuildCost(
        seconds=sum(figure.seconds for figure in stages),
        cpu_seconds=sum(figure.cpu_seconds for figure in stages),
        peak_bytes=max(figure.peak_bytes for figure in stages),
        note=note + fetched,
    )
