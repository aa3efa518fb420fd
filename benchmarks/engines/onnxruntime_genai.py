"""A model of ONNX Runtime GenAI's builder in its own generator."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime_genai as genai

from benchmarks.engines.serve import serve, versions_of
from benchmarks.wire import Facts, Options


class OnnxRuntimeGenai:
    """A generator that is rewound for each sequence."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._threads = _set_threads(Path(options.model), options.threads)
        self._model = genai.Model(options.model)
        params = genai.GeneratorParams(self._model)
        params.set_search_options(max_length=options.max_length, min_length=0, do_sample=False)
        self._generator = genai.Generator(self._model, params)
        self._logits = np.zeros(0, np.float32)

    @property
    def position(self) -> int:
        """By the generator's own count."""
        return len(self._generator.get_sequence(0))

    def facts(self) -> Facts:
        """Threads as written into the model's session options."""
        return Facts(self._threads, self._options.max_length, versions_of("onnxruntime-genai", "onnxruntime"))

    def reset(self) -> None:
        """Back to an empty sequence."""
        self._generator.rewind_to(0)

    def feed(self, ids: list[int]) -> int:
        """Append tokens, which runs the model on them."""
        self._generator.append_tokens(np.array([ids], dtype=np.int32))
        logits = self._generator.get_logits()
        self._logits = logits.reshape(-1, logits.shape[-1])[-1]
        return int(self._logits.argmax())

    def logits(self) -> np.ndarray:
        """A copy that the generator made."""
        return self._logits


def _set_threads(folder: Path, threads: int) -> int:
    """The number of threads is an entry of the model's own configuration."""
    file = folder / "genai_config.json"
    config = json.loads(file.read_text())
    config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
    file.write_text(json.dumps(config, indent=4))
    return threads


if __name__ == "__main__":
    serve(OnnxRuntimeGenai)
