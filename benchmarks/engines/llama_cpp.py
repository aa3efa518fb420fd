"""llama.cpp through llama-cpp-python's binding of its C interface."""

from __future__ import annotations

import ctypes

import llama_cpp as llama
import numpy as np

from benchmarks.engines.serve import serve, versions_of
from benchmarks.wire import Facts, Options


class LlamaCpp:
    """A GGUF model with a context of its own."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._log = llama.llama_log_callback(lambda level, text, data: None)  # kept: the library calls it
        llama.llama_log_set(self._log, ctypes.c_void_p(0))
        llama.llama_backend_init()
        self._model = llama.llama_model_load_from_file(options.model.encode(), llama.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"{options.model}: llama.cpp cannot load it")
        self._vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._context = self._open_context()
        self._memory = llama.llama_get_memory(self._context)

    @property
    def position(self) -> int:
        """By the context's own count."""
        return int(llama.llama_memory_seq_pos_max(self._memory, 0)) + 1

    def facts(self) -> Facts:
        """The context's own numbers."""
        return Facts(
            threads=int(llama.llama_n_threads(self._context)),
            max_length=int(llama.llama_n_ctx(self._context)),
            versions=versions_of("llama-cpp-python"),
        )

    def reset(self) -> None:
        """Forget all tokens."""
        llama.llama_memory_clear(self._memory, False)

    def feed(self, ids: list[int]) -> int:
        """One call of ``llama_decode``; logits of the last token alone, which is its default."""
        tokens = (llama.llama_token * len(ids))(*ids)
        code = llama.llama_decode(self._context, llama.llama_batch_get_one(tokens, len(ids)))
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code} for {len(ids)} tokens")
        return int(self.logits().argmax())

    def logits(self) -> np.ndarray:
        """A view of the context's memory."""
        pointer = llama.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(pointer, shape=(self._vocabulary,))

    def _open_context(self) -> llama.llama_context_p:
        params = llama.llama_context_default_params()
        params.n_ctx = self._options.max_length
        params.n_batch = self._options.max_length  # a prompt in one call; n_ubatch stays at its default
        params.n_threads = params.n_threads_batch = self._options.threads
        context = llama.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError(f"{self._options.model}: llama.cpp cannot make a context")
        return context


if __name__ == "__main__":
    serve(LlamaCpp)
