"""Parse a GGUF file once a load: transformers parses it anew for the config, the weights and the tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from os import PathLike

import gguf

from pipeline.substitution import replaced


@contextmanager
def parsed_once() -> Iterator[None]:
    """Inside, opening the same GGUF file again gives the same reader, and a tensor name map is made once."""
    parse = gguf.GGUFReader
    cached = lru_cache(maxsize=1)(parse)

    def reader(path: str | PathLike[str]) -> gguf.GGUFReader:
        return cached(str(path))

    names = lru_cache(maxsize=None)(gguf.get_tensor_name_map)
    with replaced(gguf, "GGUFReader", reader), replaced(gguf, "get_tensor_name_map", names):
        yield
