"""OpenVINO GenAI, from the Q4_0 file that llama.cpp made of the source."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks import weights
from benchmarks.commands import python
from benchmarks.environment import Environment, interpreter_of
from benchmarks.making import made
from benchmarks.peer import Ready, Workspace
from benchmarks.peers.llama_cpp import quantized

ENVIRONMENT = Environment("openvino_genai", ("openvino-genai==2026.4.1.0", "numpy"))


@dataclass(frozen=True)
class OpenVinoGenai:
    """Its own reading of the GGUF file."""

    @property
    def name(self) -> str:
        """As in tables."""
        return "OpenVINO GenAI Q4_0"

    @property
    def positions(self) -> None:
        """Those of the run."""
        return None

    def prepare(self, workspace: Workspace) -> Ready:
        """Install, quantize, convert."""
        interpreter = interpreter_of(ENVIRONMENT, workspace.root)
        source, _ = quantized(workspace, "Q4_0")

        def command(folder: Path) -> tuple[str, ...]:
            arguments = (str(source), str(folder))
            return python("benchmarks.makers.openvino_gguf", *arguments, interpreter=interpreter)

        folder, cost = made(workspace, "openvino_genai", command)
        size = (folder / "openvino_model.bin").stat().st_size
        held = weights.Weights("as converted from Q4_0; computes as its defaults choose", size, size)
        each = weights.cache_bytes(workspace.source().folder, 1)  # 8 bits by default; the scales add a few percent
        return Ready(python("benchmarks.engines.openvino", interpreter=interpreter), str(folder), held, each, cost)
