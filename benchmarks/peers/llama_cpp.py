"""llama.cpp, built here from llama-cpp-python's source so that it uses what this processor has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks import weights
from benchmarks.commands import python
from benchmarks.environment import Environment, interpreter_of
from benchmarks.making import made
from benchmarks.peer import Ready, Workspace
from benchmarks.records import BuildCost

ENVIRONMENT = Environment(
    "llama_cpp",
    ("llama-cpp-python==0.3.36",),
    {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_CURL=OFF", "CMAKE_BUILD_PARALLEL_LEVEL": "1"},
)
_FILE = "model.gguf"


@dataclass(frozen=True)
class LlamaCpp:
    """One of its quantizations, made of the source by its own tool."""

    kind: str  # "Q4_0", "Q8_0"

    @property
    def name(self) -> str:
        """As in tables."""
        return f"llama.cpp {self.kind}"

    @property
    def positions(self) -> None:
        """Those of the run."""
        return None

    def prepare(self, workspace: Workspace) -> Ready:
        """Install, quantize."""
        interpreter = interpreter_of(ENVIRONMENT, workspace.root)
        path, cost = quantized(workspace, self.kind)
        command = python("benchmarks.engines.llama_cpp", interpreter=interpreter)
        item = 2  # keys and values in float16, its default
        return Ready(
            command, str(path), weights.of_gguf(path), weights.cache_bytes(workspace.source().folder, item), cost
        )


def quantized(workspace: Workspace, kind: str) -> tuple[Path, BuildCost]:
    """The source in one of llama.cpp's types; OpenVINO GenAI reads such a file too.

    Raises:
        PeerError: llama.cpp cannot be installed, or does not make it.
    """
    interpreter = interpreter_of(ENVIRONMENT, workspace.root)

    def command(folder: Path) -> tuple[str, ...]:
        source, target = str(workspace.source().gguf), str(folder / _FILE)
        arguments = (source, target, kind, str(workspace.threads))
        return python("benchmarks.makers.llama_quantize", *arguments, interpreter=interpreter)

    folder, cost = made(workspace, f"llama_cpp_{kind}", command)
    return folder / _FILE, cost
