"""ONNX Runtime GenAI with the int4 model of its own builder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks import weights
from benchmarks.commands import python
from benchmarks.environment import Environment, interpreter_of
from benchmarks.making import made
from benchmarks.peer import Ready, Workspace

ENVIRONMENT = Environment(
    "onnxruntime_genai",
    (
        "torch==2.13.0",
        "onnxruntime-genai==0.18.0",
        "transformers==5.24.0",
        "onnx",
        "onnx-ir",
        "safetensors",
    ),
)


@dataclass(frozen=True)
class OnnxRuntimeGenai:
    """4-bit weights in blocks of 32, 8-bit activations (accuracy level 4): the nearest to 8da4w that it has."""

    @property
    def name(self) -> str:
        """As in tables."""
        return "ONNX Runtime GenAI int4"

    @property
    def positions(self) -> None:
        """Those of the run."""
        return None

    def prepare(self, workspace: Workspace) -> Ready:
        """Install, build."""
        interpreter = interpreter_of(ENVIRONMENT, workspace.root)
        source = workspace.source().folder

        def command(folder: Path) -> tuple[str, ...]:
            options = ("--extra_options", "int4_accuracy_level=4", "int4_block_size=32")
            places = ("-i", str(source), "-o", str(folder), "-c", str(folder / "cache"))
            builder = "onnxruntime_genai.models.builder"
            return python(builder, *places, "-p", "int4", "-e", "cpu", *options, interpreter=interpreter)

        folder, cost = made(workspace, self.name.replace(" ", "_"), command)
        size = sum(file.stat().st_size for file in folder.glob("model.onnx*"))
        held = weights.Weights("int4 in blocks of 32, output layer and embeddings one table", size, size)
        each = weights.cache_bytes(source, 4)
        return Ready(
            python("benchmarks.engines.onnxruntime_genai", interpreter=interpreter), str(folder), held, each, cost
        )
