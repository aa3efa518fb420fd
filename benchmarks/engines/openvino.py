"""OpenVINO on the model that OpenVINO GenAI makes of the GGUF file.

GenAI's pipeline chooses its tokens itself and gives no logits, so that the model it made is run by the runtime below
it: one stateful request that keeps the cache.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino

from benchmarks.engines.serve import serve, versions_of
from benchmarks.wire import Facts, Options


class OpenVino:
    """A compiled model and its one request."""

    def __init__(self, options: Options) -> None:
        self._options = options
        core = openvino.Core()
        settings = {"INFERENCE_NUM_THREADS": str(options.threads), "PERFORMANCE_HINT": "LATENCY"}
        model = core.compile_model(str(Path(options.model) / "openvino_model.xml"), "CPU", settings)
        self._threads = int(model.get_property("INFERENCE_NUM_THREADS"))
        self._request = model.create_infer_request()
        self._logits = np.zeros(0, np.float32)
        self._position = 0

    @property
    def position(self) -> int:
        """By the length of the state itself."""
        states = self._request.query_state()
        return 0 if self._position == 0 else max(state.state.shape[-2] for state in states)

    def facts(self) -> Facts:
        """The state grows: the run's length is its limit."""
        return Facts(self._threads, self._options.max_length, versions_of("openvino-genai", "openvino"))

    def reset(self) -> None:
        """Empty the state."""
        self._request.reset_state()
        self._position = 0

    def feed(self, ids: list[int]) -> int:
        """One inference."""
        end = self._position + len(ids)
        inputs = {
            "input_ids": np.array([ids], np.int64),
            "attention_mask": np.ones((1, end), np.int64),
            "position_ids": np.arange(self._position, end, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        self._request.infer(inputs, share_inputs=True)
        self._position = end
        self._logits = self._request.get_tensor("logits").data[0, -1]
        return int(self._logits.argmax())

    def logits(self) -> np.ndarray:
        """A view of the request's output."""
        return self._logits


if __name__ == "__main__":
    serve(OpenVino)
