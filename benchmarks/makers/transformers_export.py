"""``python -m benchmarks.makers.transformers_export SOURCE TARGET LENGTH``: transformers' own ExecuTorch exporter.

Its component for decoding with a static cache and any number of tokens, which serves prompts too.
"""

from __future__ import annotations

import sys

import torch
from torch.export import Dim
from transformers import AutoModelForCausalLM, GenerationConfig, StaticCache
from transformers.exporters.exporter_executorch import ExecutorchConfig, ExecutorchExporter
from transformers.exporters.utils import decompose_for_generation

COMPONENT = "decode"
LAYER_LEAVES = 3  # of a static layer: keys, values, their number
MOST_TOKENS = 512  # of a call: their logits are planned for


def main(arguments: list[str]) -> None:
    """Write the folder."""
    source, target, length = arguments
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval().requires_grad_(False)
    ids = torch.arange(1, 9)[None]
    generation = GenerationConfig(
        cache_implementation="static",
        max_cache_len=int(length),
        cache_config={"max_cache_len": int(length)},
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    parts = decompose_for_generation(model, inputs, generation_config=generation, multi_token_decode=True)
    submodel, example = parts[COMPONENT]
    example, shapes = _dynamic(example, int(length))
    config = ExecutorchConfig(dynamic_shapes=shapes, prefer_deferred_runtime_asserts_over_guards=True)
    ExecutorchExporter().export(submodel, example, config).save_pretrained(target)


def _dynamic(example: dict[str, object], length: int) -> tuple[dict[str, object], dict[str, object]]:
    """The example's tensors, and which axis of each varies.

    Only the number of tokens varies: with ``dynamic=True`` the cache's length would too, up to the model's limit.
    """
    tokens = Dim("tokens", min=1, max=min(MOST_TOKENS, length - 1))
    axes = {"input_ids": 1, "position_ids": 1, "attention_mask": 2}
    inputs = {name: value for name, value in example.items() if name in axes or name == "cache"}
    shapes: dict[str, object] = {name: {axes[name]: tokens} for name in inputs if name in axes}
    cache = inputs["cache"]
    assert isinstance(cache, StaticCache), "as the generation configuration asks for"
    shapes["cache"] = [None] * (LAYER_LEAVES * len(cache.layers))
    return inputs, shapes


if __name__ == "__main__":
    main(sys.argv[1:])
