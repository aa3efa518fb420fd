"""A program of transformers' own ExecuTorch exporter, in the runner that transformers ships for it."""

from __future__ import annotations

import numpy as np
import torch
from executorch.extension.pybindings import portable_lib
from transformers import AutoConfig, StaticCache
from transformers.exporters.base import ExportedModel

from benchmarks.engines.serve import serve, versions_of
from benchmarks.wire import Facts, Options

MOST_TOKENS = 512  # of a call, as exported


class TransformersExporter:
    """The exported component, and the static cache that goes in and comes out."""

    def __init__(self, options: Options) -> None:
        torch.set_num_threads(1)  # only the mask and argmax are torch's: its pool would spin beside the runtime's
        torch.set_grad_enabled(False)
        portable_lib._unsafe_reset_threadpool(options.threads)
        self._options = options
        self._config = AutoConfig.from_pretrained(options.model)
        (self._run,) = ExportedModel.from_pretrained(options.model).runners.values()
        self._cache: StaticCache
        self._logits = torch.zeros(0)
        self.reset()

    @property
    def position(self) -> int:
        """By the cache's own count, a tensor that the program changes."""
        return int(self._cache.layers[0].cumulative_length)

    def facts(self) -> Facts:
        """The pool's own number of threads."""
        threads = int(portable_lib._threadpool_get_thread_count())
        return Facts(threads, self._options.max_length, versions_of("transformers", "executorch", "torch"))

    def reset(self) -> None:
        """A cache of zeros."""
        config = self._config
        self._cache = StaticCache(config, max_cache_len=self._options.max_length)
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._cache.early_initialization(1, config.num_key_value_heads, width, torch.float32, torch.device("cpu"))

    def feed(self, ids: list[int]) -> int:
        """Calls of as many tokens as the program takes."""
        for start in range(0, len(ids), MOST_TOKENS):
            self._call(ids[start : start + MOST_TOKENS])
        return int(self._logits.argmax())

    def logits(self) -> np.ndarray:
        """The program's own output."""
        values: np.ndarray = self._logits.numpy()
        return values

    def _call(self, ids: list[int]) -> None:
        begin = self.position
        places = torch.arange(begin, begin + len(ids))[None]
        mask = torch.arange(self._options.max_length)[None, None, None] <= places[:, None, :, None]
        outputs = self._run(input_ids=torch.tensor([ids]), attention_mask=mask, position_ids=places, cache=self._cache)
        self._cache = outputs.cache
        self._logits = outputs.logits[0, -1]


if __name__ == "__main__":
    serve(TransformersExporter)
