"""Parse a GGUF file once a load: transformers parses it anew for the config, the weights and the tokenizer.

A vocabulary and its merges are a hundred thousand values, each of which is read by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from os import PathLike

import gguf
import numpy as np
from transformers import modeling_gguf_pytorch_utils as transformers_gguf

from pipeline.substitution import replaced

_Value = str | int | float | bool
_Parse = Callable[[np.ndarray, list[int]], _Value]


@contextmanager
def parsed_once() -> Iterator[None]:
    """Inside, the same GGUF file gives the same reader again, and each of its values and tensor names is made once."""
    cached = lru_cache(maxsize=1)(_Reader)

    def reader(path: str | PathLike[str]) -> gguf.GGUFReader:
        return cached(str(path))

    names = lru_cache(maxsize=None)(gguf.get_tensor_name_map)
    with (
        replaced(gguf, "GGUFReader", reader),
        replaced(gguf, "get_tensor_name_map", names),
        replaced(transformers_gguf, "_gguf_parse_value", _each_once(transformers_gguf._gguf_parse_value)),
    ):
        yield


class _Reader(gguf.GGUFReader):  # type: ignore[misc]  # gguf is not type-checked here
    """Cuts the mapped file up as a plain array: cutting a ``memmap`` takes several times as long."""

    @property
    def data(self) -> np.ndarray:
        return self._data

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._data = np.asarray(mapped)


def _each_once(parse: _Parse) -> _Parse:
    """Remember a value by the array that holds it, one of the reader's own."""
    known: dict[int, tuple[np.ndarray, _Value]] = {}

    def parsed(value: np.ndarray, types: list[int]) -> _Value:
        if id(value) not in known:
            known[id(value)] = value, parse(value, types)
        return known[id(value)][1]

    return parsed
