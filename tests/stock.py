"""ExecuTorch's own LLM runner, in a process of its own: it shares a thread pool with all that runs beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

_PROGRAM = """\
import json, sys
from executorch.extension.pybindings import portable_lib  # the runner needs it first
from executorch.extension.llm.custom_ops import custom_ops
import executorch.kernels.quantized
from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner

program, tokenizer, tokens, prompts = json.loads(sys.stdin.read())
runner = TextLLMRunner(program, tokenizer)
texts = []
for prompt in prompts:
    pieces = []
    runner.reset()
    runner.generate(prompt, GenerationConfig(max_new_tokens=tokens, temperature=0.0, echo=False), pieces.append, None)
    texts.append("".join(pieces))
open(sys.argv[1], "w", encoding="utf-8").write(json.dumps(texts))
"""


def stock_texts(program: Path, tokenizer: Path, prompts: Sequence[str], tokens: int, folder: Path) -> list[str]:
    """What ``TextLLMRunner`` writes after each prompt, greedily, ``tokens`` tokens at most."""
    answer = folder / "stock.json"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PROGRAM, str(answer)],
        input=json.dumps([str(program), str(tokenizer), tokens, list(prompts)]),
        text=True,
        check=True,
    )
    texts: list[str] = json.loads(answer.read_text(encoding="utf-8"))
    return texts


_ABOUT_AN_IMAGE = """\
import json, sys
from executorch.extension.pybindings import portable_lib  # the runner needs it first
from executorch.extension.llm.custom_ops import custom_ops
import torch
from executorch.extension.llm.runner import GenerationConfig, MultimodalRunner, make_image_input, make_token_input

program, tokenizer, tokens, before, image, after = json.loads(sys.stdin.read())
runner = MultimodalRunner(program, tokenizer)
pieces = []
inputs = [make_token_input(before), make_image_input(torch.tensor(image)), make_token_input(after)]
runner.generate(inputs, GenerationConfig(max_new_tokens=tokens, temperature=0.0, echo=False), pieces.append, None)
open(sys.argv[1], "w", encoding="utf-8").write(json.dumps("".join(pieces)))
"""


def stock_answer_about(
    program: Path,
    tokenizer: Path,
    before: list[int],
    pixels: torch.Tensor,
    after: list[int],
    tokens: int,
    folder: Path,
) -> str:
    """What ``MultimodalRunner`` writes after tokens, an image (float32 ``[1, 3, H, W]``) and tokens, greedily."""
    answer = folder / "stock_image.json"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _ABOUT_AN_IMAGE, str(answer)],
        input=json.dumps([str(program), str(tokenizer), tokens, before, pixels[0].tolist(), after]),
        text=True,
        check=True,
    )
    found: str = json.loads(answer.read_text(encoding="utf-8"))
    return found
