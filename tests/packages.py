"""Packages for the tests of the runners: a toy language model with a cache, lowered by ExecuTorch itself.

V vocabulary, D width, L cache length, n tokens of a call. The model attends over its cache, so that a stale entry, a
wrong position or a cache that two methods do not share changes its logits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from runners.manifest import (
    CHAT_TEMPLATE_NAME,
    MANIFEST_NAME,
    PROGRAM_NAME,
    TOKENIZER_NAME,
    Cache,
    CacheTensor,
    Delegation,
    FileEntry,
    Manifest,
    Method,
    ModelIdentity,
    TensorSpec,
    Tokenizer,
    sealed,
    to_json,
)
from tests import tiny

V, D, L, CHUNK = 300, 16, 64, 8
LONGEST = {"forward": CHUNK, "decode": 1, "verify": 5}  # tokens a call
Placement = Literal["buffer", "io"]


def _attend(x: torch.Tensor, where: torch.Tensor, cache: torch.Tensor, head: nn.Linear) -> torch.Tensor:
    """x [1, n, D] at positions ``where`` [n] over cache [1, L, D] -> logits [1, n, V]."""
    scores = x @ cache.transpose(1, 2)
    seen = torch.arange(L)[None, :] <= where[:, None]
    weights = torch.softmax(torch.where(seen, scores, torch.full_like(scores, -1e9)), -1)
    return head(weights @ cache)


class Buffered(nn.Module):
    """The toy model with its cache in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.embedding = nn.Embedding.from_pretrained(torch.randn(V, D, generator=generator))
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = nn.Parameter(torch.randn(V, D, generator=generator), requires_grad=False)
        self.register_buffer("cache", torch.zeros(1, L, D))

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        where = torch.arange(tokens.shape[1]) + position
        x = self.embedding(tokens)
        self.cache.index_copy_(1, where, x)
        return _attend(x, where, self.cache, self.head)


class Functional(Buffered):
    """The toy model with its cache as an input and an output; the last token's logits alone."""

    def forward(self, tokens, position, cache):
        n = tokens.shape[1]
        where = torch.arange(n) + position
        x = self.embedding(tokens)
        cache = torch.index_copy(cache, 1, where, x)
        return _attend(x, where, cache, self.head)[:, -1:], cache


def eager_logits(ids: list[int]) -> torch.Tensor:
    """Logits [len(ids), V] of the whole sequence in one eager pass over an empty cache."""
    with torch.no_grad():
        return Buffered()(torch.tensor([ids]), torch.tensor([0]))[0]


def program_bytes(placement: Placement, *, decode: bool, verify: bool = False) -> bytes:
    """The toy model as an ExecuTorch program."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
    from executorch.exir.passes import MemoryPlanningPass
    from executorch.exir.passes.sym_shape_eval_pass import ConstraintBasedSymShapeEvalPass

    names = ["forward"] + ["decode"] * decode + ["verify"] * verify
    methods = {name: _exported(placement, LONGEST[name]) for name in names}
    edge = to_edge_transform_and_lower(
        methods,
        partitioner=[XnnpackPartitioner()],
        compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
    )
    plan = MemoryPlanningPass(alloc_graph_input=False, share_mutable_buffers=placement == "buffer")
    config = ExecutorchBackendConfig(
        run_reinplace_pass=True, sym_shape_eval_pass=ConstraintBasedSymShapeEvalPass(), memory_planning_pass=plan
    )
    return edge.to_executorch(config).buffer


def _exported(placement: Placement, longest: int):
    model = (Buffered() if placement == "buffer" else Functional()).eval()
    cache = () if placement == "buffer" else (torch.zeros(1, L, D),)
    inputs = (torch.zeros(1, min(longest, 4), dtype=torch.int64), torch.zeros(1, dtype=torch.int64), *cache)
    free = {1: torch.export.Dim("n", min=1, max=longest)} if longest > 1 else None
    return torch.export.export(model, inputs, dynamic_shapes=(free, *[None] * (len(inputs) - 1)), strict=False)


@dataclass(frozen=True)
class Program:
    """A program's bytes and what its manifest says about it."""

    data: bytes
    placement: Placement = "buffer"
    methods: tuple[str, ...] = ("forward",)


def write_package(
    folder: Path,
    program: Program,
    *,
    with_tokenizer: bool = True,
    chat_template: str | None = tiny.CHAT_TEMPLATE,
    change: Callable[[Manifest], Manifest] = lambda manifest: manifest,
) -> Path:
    """Write a package of ``program`` into ``folder``; ``change`` edits the manifest before it is sealed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PROGRAM_NAME).write_bytes(program.data)
    if with_tokenizer:
        tiny.tokenizer(V).backend_tokenizer.save(str(folder / TOKENIZER_NAME))
        if chat_template is not None:
            (folder / CHAT_TEMPLATE_NAME).write_text(chat_template)
    template = CHAT_TEMPLATE_NAME if chat_template is not None else None
    tokenizer = Tokenizer(
        file=TOKENIZER_NAME,
        chat_template=template,
        bos_id=1,
        eos_ids=[2],
        adds_bos=False,
        special_tokens={"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
    )
    files = {path.name: _entry(path) for path in folder.iterdir() if path.name != MANIFEST_NAME}
    manifest = change(_manifest(program, tokenizer if with_tokenizer else None, files))
    (folder / MANIFEST_NAME).write_text(to_json(sealed(manifest)))
    return folder


def _entry(path: Path) -> FileEntry:
    return FileEntry(sha256=hashlib.sha256(path.read_bytes()).hexdigest(), size=path.stat().st_size)


def _manifest(program: Program, tokenizer: Tokenizer | None, files: dict[str, FileEntry]) -> Manifest:
    tensor = CacheTensor(path="cache.layers.0.keys", kind="full", shape=[1, L, 1, D], dtype="float32", bytes=4 * L * D)
    return Manifest(
        schema_version=1,
        name="toy",
        created_by="tests",
        model=ModelIdentity(
            source="tests",
            revision=None,
            digest="0" * 64,
            architecture="Toy",
            task="text-generation",
            licence=None,
            parameters=2 * V * D,
            random_weights=True,
            vocabulary_size=V,
        ),
        config={},
        quantization={},
        methods={name: _method(program.placement, LONGEST[name]) for name in program.methods},
        constant_methods={},
        cache=Cache(
            placement=program.placement, attention="portable", max_length=L, bytes=tensor.bytes, tensors=[tensor]
        ),
        tokenizer=tokenizer,
        backends=["XnnpackBackend"],
        operators=["aten::embedding.out"],
        versions={"executorch": "1.5.1"},
        timings={},
        check=None,
        files=files,
    )


def _method(placement: Placement, longest: int) -> Method:
    cache = [] if placement == "buffer" else [_spec("cache.layers.0.keys", [1, L, D], "float32")]
    rows = longest if placement == "buffer" else 1
    tokens = TensorSpec(name="tokens", dtype="int64", shape=[1, longest], min_shape=[1, 1])
    logits = TensorSpec(name="logits", dtype="float32", shape=[1, rows, V], min_shape=[1, 1, V])
    position = _spec("position", [1], "int64")
    return Method(
        inputs=[tokens, position, *cache],
        outputs=[logits, *cache],
        planned_bytes=0,
        delegation=Delegation(delegates=1, delegated_operators=1, undelegated=[]),
    )


def _spec(name: str, shape: list[int], dtype: str) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape, min_shape=shape)
