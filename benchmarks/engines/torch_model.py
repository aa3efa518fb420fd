"""transformers in PyTorch, float32: eager, or with its forward compiled. In this project's own environment.

A static cache, which torch.compile needs; eager is measured with the growing cache that transformers uses by default.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from benchmarks.engines.serve import serve, versions_of
from benchmarks.wire import Facts, Options

COMPILED_PROMPT = 128  # prompts of other lengths run eagerly: each length would be compiled anew


class TorchModel:
    """A model of transformers and its cache."""

    def __init__(self, options: Options) -> None:
        torch.set_num_threads(options.threads)
        torch.set_grad_enabled(False)
        self._options = options
        self._model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
        compiled = options.variant == "compile"
        self._fast = torch.compile(self._model.forward, dynamic=False) if compiled else self._model.forward
        self._cache: DynamicCache | StaticCache
        self._logits = torch.zeros(0)
        self._static = self._static_cache() if compiled else None
        self.reset()

    @property
    def position(self) -> int:
        """By the cache's own count."""
        return int(self._cache.get_seq_length())

    def facts(self) -> Facts:
        """The growing cache ends where the model's positions do."""
        return Facts(torch.get_num_threads(), self._options.max_length, versions_of("torch", "transformers"))

    def reset(self) -> None:
        """A growing cache begins anew; a static one is emptied in place, else compiled code would not fit it."""
        if self._static is None:
            self._cache = DynamicCache(config=self._model.config)
        else:
            self._static.reset()
            self._cache = self._static

    def feed(self, ids: list[int]) -> int:
        """One call of the model, logits of the last token alone."""
        forward = self._fast if len(ids) in (1, COMPILED_PROMPT) else self._model.forward
        self._logits = forward(torch.tensor([ids]), cache=self._cache, logits_to_keep=1).logits[0, -1]
        return int(self._logits.argmax())

    def logits(self) -> np.ndarray:
        """The model's own output."""
        values: np.ndarray = self._logits.numpy()
        return values

    def _static_cache(self) -> StaticCache:
        config = self._model.config
        width = json.loads((Path(self._options.model) / "config.json").read_text()).get("head_dim")
        width = width or config.hidden_size // config.num_attention_heads
        cache = StaticCache(config, max_cache_len=self._options.max_length)
        heads = config.num_key_value_heads
        cache.early_initialization(1, heads, width, torch.float32, torch.device("cpu"))
        return cache


if __name__ == "__main__":
    serve(TorchModel)
