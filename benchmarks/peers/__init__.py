"""Who is compared: one module a peer, and the list of those a run takes by default."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.peer import Peer
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.onnxruntime_genai import OnnxRuntimeGenai
from benchmarks.peers.openvino_genai import OpenVinoGenai
from benchmarks.peers.optimum_executorch import OptimumExecutorch
from benchmarks.peers.pteline import Pteline
from benchmarks.peers.torch_model import TorchModel
from benchmarks.peers.transformers_exporter import TransformersExporter


def others() -> dict[str, Peer]:
    """The peers that are not of this project, by their names."""
    peers: list[Peer] = [
        LlamaCpp("Q4_0"),
        LlamaCpp("Q8_0"),
        OptimumExecutorch(),
        TransformersExporter(),
        OnnxRuntimeGenai(),
        OpenVinoGenai(),
        TorchModel(compiled=False),
        TorchModel(compiled=True),
    ]
    return {peer.name: peer for peer in peers}


def own(packages: Sequence[Path], long: Sequence[Path], long_positions: tuple[int, ...]) -> list[Peer]:
    """This project's packages; those with a long cache are measured at positions of their own besides."""
    return [*(Pteline(path) for path in packages), *(Pteline(path, long_positions) for path in long)]
