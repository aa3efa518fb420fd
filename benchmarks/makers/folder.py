"""``python -m benchmarks.makers.folder CONFIG TARGET``: a configuration's model as a folder, float32.

In this project's own environment. Peers that cannot read the source read this folder; its weights are the source's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from pipeline.config_reader import read
from pipeline.load import load


def main(arguments: list[str]) -> None:
    """Write the folder."""
    config, target = map(Path, arguments)
    loaded = load(read(config, ["name=source"]).model)  # it may be a base, which has no name
    loaded.model.save_pretrained(target)
    if loaded.tokenizer is not None:
        tokenizer = Tokenizer.from_str(loaded.tokenizer.tokenizer_json)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **loaded.tokenizer.info.special_tokens).save_pretrained(
            target
        )
    _explain_rotary(target / "config.json")


def _explain_rotary(file: Path) -> None:
    """Older readers look for ``rope_theta`` beside the other entries, newer ones inside ``rope_parameters``."""
    data = json.loads(file.read_text())
    parameters = data.get("rope_parameters")
    if isinstance(parameters, dict) and "rope_theta" in parameters:
        data.setdefault("rope_theta", parameters["rope_theta"])
    file.write_text(json.dumps(data, indent=2) + "\n")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main(sys.argv[1:])
