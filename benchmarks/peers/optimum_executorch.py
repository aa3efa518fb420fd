"""optimum-executorch with every flag that makes it fast."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks import weights
from benchmarks.commands import python
from benchmarks.environment import Environment, interpreter_of
from benchmarks.errors import PeerError
from benchmarks.making import is_made, made
from benchmarks.peer import Ready, Workspace

# It asks for a release candidate of transformers, which cannot be installed beside this project's.
ENVIRONMENT = Environment(
    "optimum_executorch",
    ("torch==2.13.0", "torchao==0.18.0", "executorch==1.5.1", "optimum-executorch==1.1.0", "transformers==5.0.0rc1"),
)
_MODEL = "optimum_executorch"
_FLAGS = (
    *("--task", "text-generation", "--recipe", "xnnpack", "--use_custom_sdpa", "--use_custom_kv_cache"),
    *("--qlinear", "8da4w", "--qlinear_group_size", "32", "--qembedding", "8w"),
)

# Custom SDPA calls MKL from ExecuTorch's pool, beside which MKL would start OpenMP threads of its own.
_ONE_MKL_THREAD = ("env", "MKL_NUM_THREADS=1")


@dataclass(frozen=True)
class OptimumExecutorch:
    """Custom SDPA, custom cache, 8da4w in groups of 32, 8-bit embeddings."""

    @property
    def name(self) -> str:
        """As in tables."""
        return "optimum-executorch 8da4w"

    @property
    def positions(self) -> None:
        """Those of the run."""
        return None

    def prepare(self, workspace: Workspace) -> Ready:
        """Install; build where that was asked for, since it takes long."""
        if not workspace.slow and not is_made(workspace, _MODEL):
            raise PeerError("its model is not built yet, which takes many minutes: give --slow to build it once")
        interpreter = interpreter_of(ENVIRONMENT, workspace.root)
        source = workspace.source().folder

        def command(folder: Path) -> tuple[str, ...]:
            tool = str(interpreter.with_name("optimum-cli"))
            places = ("--model", str(source), "--output_dir", str(folder))
            return (tool, "export", "executorch", *places, *_FLAGS, "--max_seq_len", str(workspace.max_length))

        folder, cost = made(workspace, _MODEL, command)
        held = weights.of_pte(folder / "model.pte", "linears and output layer 8da4w (groups of 32), embeddings 8 bits")
        each = weights.cache_bytes(source, 4)
        worker = python("benchmarks.engines.optimum_executorch", interpreter=interpreter)
        return Ready((*_ONE_MKL_THREAD, *worker), str(folder), held, each, cost)
