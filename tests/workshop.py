"""A folder with a tiny model in which packages are built, and what its packages and eager PyTorch say."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import yaml
from rich.console import Console

from pipeline.artifacts import Package
from pipeline.build import BuildOptions, build
from pipeline.config_reader import read
from pipeline.stage_cache import StageCache
from pipeline.stages import Stages
from runners.generate import generate
from runners.package import open_package
from runners.session import Session
from runners.tokenizer import open_tokenizer
from tests import tiny

ROOT = Path(__file__).parents[1]
LENGTH, STEPS = 64, 8
PROMPTS = ["The quick brown fox", "Every morning the baker"]
EXACT = {"min_equal_prompts": 1.0, "max_logit_difference": 1e-3, "max_perplexity_ratio": 1.001}


class Workshop:
    """A folder with a tiny model, a text and a stage cache; builds packages in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tiny.save_llama(folder / "llama")
        (folder / "text.txt").write_text(tiny.TRAINING_TEXT)

    def config(self, name: str, **sections: dict[str, object]) -> Path:
        """Write a configuration; ``sections`` replace what it says otherwise."""
        check = {
            "chat": False,
            "prompts": PROMPTS,
            "steps": STEPS,
            "long_prompt": 40,
            "to_the_end": True,
            "perplexity": {"text": "text.txt", "tokens": 48, "window": 24},
            "quantized": EXACT,
        }
        content = {
            "name": name,
            "model": {"source": "./llama", "licence": "MIT"},
            "cache": {"max_length": LENGTH},
            "check": check,
            "package": {"directory": str(self.folder / "dist")},
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**content, **sections}))
        return path

    def build(
        self,
        config: Path,
        *overrides: str,
        cache: str | None = "cache",
        console: Console | None = None,
        **options: object,
    ) -> Package:
        """Build in this process."""
        settings = read(config, overrides)
        root = self.folder / cache if cache is not None else None
        return build(settings, BuildOptions(**options), Stages(console or Console(quiet=True)), StageCache(root))

    def command(self, config: Path, *arguments: str) -> list[str]:
        """The command line that builds."""
        return [sys.executable, "-m", "pipeline.cli", "build", str(config), *arguments]

    def environment(self) -> dict[str, str]:
        """For that command line."""
        return {**os.environ, "PTELINE_CACHE": str(self.folder / "command_cache"), "PYTHONPATH": str(ROOT)}

    def names(self) -> set[str]:
        """What lies beside the packages."""
        dist = self.folder / "dist"
        return {path.name for path in dist.iterdir()} if dist.exists() else set()


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def report_of(package: Package) -> dict:
    return json.loads((package.path / "report" / "check.json").read_text())


def eager_tokens(text: str, steps: int = STEPS) -> list[int]:
    model, ids = tiny.llama(), tiny.tokenizer()(text, return_tensors="pt").input_ids
    generated = model.generate(ids, max_new_tokens=steps, do_sample=False, eos_token_id=None)
    return generated[0, ids.shape[1] :].tolist()


def session_tokens(package: Package, text: str, steps: int = STEPS) -> list[int]:
    opened = open_package(package.path)
    tokens: list[int] = []
    ids = open_tokenizer(opened).encode(text)
    session = Session.open(opened, threads=1)
    greedy: Callable[[torch.Tensor], int] = lambda logits: int(logits.argmax())  # noqa: E731
    generate(session, ids, greedy, eos_ids=frozenset(), max_new_tokens=steps, emit=tokens.append)
    return tokens


def stages_of(package: Package) -> dict[str, bool]:
    """Stage -> whether its result came from the cache."""
    return {name: figure.cached for name, figure in package.manifest.timings.items()}
