"""The ExecuTorch exporter that transformers ships, in this project's own environment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks import weights
from benchmarks.commands import python
from benchmarks.making import made
from benchmarks.peer import Ready, Workspace


@dataclass(frozen=True)
class TransformersExporter:
    """XNNPACK, float32, a static cache: what its own example gives."""

    @property
    def name(self) -> str:
        """As in tables."""
        return "transformers exporter float32"

    @property
    def positions(self) -> None:
        """Those of the run."""
        return None

    def prepare(self, workspace: Workspace) -> Ready:
        """Export."""
        source = workspace.source().folder

        def command(folder: Path) -> tuple[str, ...]:
            arguments = (str(source), str(folder), str(workspace.max_length))
            return python("benchmarks.makers.transformers_export", *arguments)

        folder, cost = made(workspace, f"transformers_exporter_{workspace.max_length}", command)
        program = next(folder.glob("*.pte"))
        held = weights.of_pte(program, "32 bits a weight")
        return Ready(
            python("benchmarks.engines.transformers_exporter"), str(folder), held, weights.cache_bytes(source, 4), cost
        )
