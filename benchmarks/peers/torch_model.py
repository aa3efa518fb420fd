"""transformers' model in PyTorch, in this project's own environment."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks import weights
from benchmarks.commands import python
from benchmarks.peer import Ready, Workspace


@dataclass(frozen=True)
class TorchModel:
    """Eager, or compiled by ``torch.compile``; float32 as loaded."""

    compiled: bool

    @property
    def name(self) -> str:
        """As in tables."""
        return "torch.compile float32" if self.compiled else "torch eager float32"

    @property
    def positions(self) -> None:
        """Those of the run."""
        return None

    def prepare(self, workspace: Workspace) -> Ready:
        """The source's folder is all it takes."""
        folder = workspace.source().folder
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        held = weights.Weights("32 bits a weight", size, size)  # tied: the table is the output layer, read whole
        variant = "compile" if self.compiled else "eager"
        command = python("benchmarks.engines.torch_model")
        return Ready(command, str(folder), held, weights.cache_bytes(folder, 4), None, variant)
