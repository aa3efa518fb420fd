"""What a model's file holds: bits of its weights, and the bytes of them that one decode step reads.

Every matrix is read whole for a token, but for an embedding table, of which a step reads one row. (A table that is the
output layer too is read whole.) Worked out outside of the workers, whose memory is measured.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from gguf import GGUFReader

if TYPE_CHECKING:
    from executorch.exir.schema import ExecutionPlan, Tensor

_ITEM_BYTES = {"BYTE": 1, "CHAR": 1, "BOOL": 1, "HALF": 2, "BFLOAT16": 2, "SHORT": 2, "INT": 4, "FLOAT": 4, "LONG": 8}
_HEAD = 64
_OUTPUT_LAYER = "output.weight"
_EMBEDDING = "token_embd.weight"


@dataclass(frozen=True)
class Weights:
    """The weights of a model's file."""

    described: str  # "4.7 bits a weight (Q4_0 79%, Q8_0 21%)"
    step_bytes: int  # that one decode step reads
    file_bytes: int


def of_gguf(path: Path) -> Weights:
    """A GGUF file: its tensors, by type and share of the bytes."""
    tensors = [(t.name, t.tensor_type.name, int(t.n_elements), int(t.n_bytes)) for t in GGUFReader(path).tensors]
    total = sum(size for *_, size in tensors)
    kinds: Counter[str] = Counter()
    for _, kind, _, size in tensors:
        kinds[kind] += size
    shares = ", ".join(f"{kind} {size / total:.0%}" for kind, size in kinds.most_common() if size / total > 0.005)
    bits = 8 * total / sum(elements for _, _, elements, _ in tensors)
    untied = any(name == _OUTPUT_LAYER for name, *_ in tensors)
    row_only = sum(size for name, _, _, size in tensors if untied and name == _EMBEDDING)
    return Weights(f"{bits:.1f} bits a weight ({shares})", total - row_only, path.stat().st_size)


def of_pte(path: Path, described: str) -> Weights:
    """An ExecuTorch program: the file is weights, but for a percent or so of program, which counts as weights."""
    size = path.stat().st_size
    return Weights(described, size - _embedding_bytes(path), size)


def cache_bytes(folder: Path, item_bytes: int) -> int:
    """Bytes of keys and values that a position takes, from the ``config.json`` of a decoder with full attention."""
    config = json.loads((folder / "config.json").read_text())
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * heads * width * item_bytes)


def _embedding_bytes(path: Path) -> int:
    """Bytes of the constant tables that embedding operators look rows up in, each counted once."""
    # Imported here: it takes seconds.
    from executorch.exir._serialize._flatbuffer_program import _flatbuffer_to_program

    with path.open("rb") as file:
        size = int.from_bytes(file.read(_HEAD)[16:24], "little")  # schema/extended_header.h: bytes of the program
        file.seek(0)
        program = _flatbuffer_to_program(file.read(size))
    tables = {key: each for plan in program.execution_plan for key, each in _tables(plan)}
    return sum(tables.values())


def _tables(plan: ExecutionPlan) -> Iterator[tuple[int, int]]:
    """Buffer number and bytes of each constant argument of an embedding operator."""
    for instruction in (each.instr_args for chain in plan.chains for each in chain.instructions):
        if not hasattr(instruction, "op_index") or "embedding" not in plan.operators[instruction.op_index].name:
            continue
        for argument in instruction.args:
            value = plan.values[argument].val
            if type(value).__name__ == "Tensor" and value.data_buffer_idx:
                yield value.data_buffer_idx, _tensor_bytes(value)


def _tensor_bytes(tensor: Tensor) -> int:
    return int(prod(tensor.sizes)) * _ITEM_BYTES[tensor.scalar_type.name]
