"""ExecuTorch's own LLM runner, in a process of its own: it shares a thread pool with all that runs beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

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
