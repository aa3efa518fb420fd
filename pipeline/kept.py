"""Stage results as files: what the stage cache holds, and what ``--keep`` leaves behind."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch._export.serde import serialize

from pipeline.artifacts import Emitted, EmittedFacts, Exported, ProgramFacts
from pipeline.record import Recorded
from pipeline.substitution import replaced
from runners import goldens
from runners.check import FullLogits
from runners.manifest import GOLDENS_NAME, PROGRAM_NAME

FACTS = "facts.json"  # the last file of an entry or a kept result that has one
_LOGITS = "logits.safetensors"


def write_exported(exported: Exported, folder: Path) -> None:
    """Write ``<method>.pt2`` files, for ``torch.export.load``, and the facts beside them."""
    # ``save`` would bring a copy of the whole graph into canonical form, to see that it can, and let it go.
    with replaced(serialize, "canonicalize", lambda *_: None):
        for name, program in exported.programs.items():
            torch.export.save(program, folder / f"{name}.pt2")
    (folder / FACTS).write_text(exported.facts.model_dump_json())


def read_exported(folder: Path) -> Exported:
    """Read what :func:`write_exported` wrote."""
    facts = ProgramFacts.model_validate_json((folder / FACTS).read_bytes())
    return Exported({name: torch.export.load(folder / f"{name}.pt2") for name in facts.signatures}, facts)


def write_emitted(emitted: Emitted, folder: Path) -> None:
    """Write the program and its facts."""
    shutil.copyfile(emitted.program, folder / PROGRAM_NAME)
    (folder / FACTS).write_text(emitted.facts.model_dump_json())


def read_emitted(folder: Path) -> Emitted:
    """Read what :func:`write_emitted` wrote; the program stays where it lies."""
    return Emitted(folder / PROGRAM_NAME, EmittedFacts.model_validate_json((folder / FACTS).read_bytes()))


def write_recorded(recorded: Recorded, folder: Path) -> None:
    """Write the goldens, and both references' whole logits (float32 ``[steps, vocabulary]`` a prompt)."""
    goldens.save(recorded.goldens, folder / GOLDENS_NAME)
    full = {"quantized": recorded.full.quantized, "unquantized": recorded.full.unquantized}
    tensors = {f"{kind}/{name}": logits.clone() for kind, by_name in full.items() for name, logits in by_name.items()}
    save_file(tensors, folder / _LOGITS)


def read_recorded(folder: Path) -> Recorded:
    """Read what :func:`write_recorded` wrote."""
    tensors = load_file(folder / _LOGITS)
    by_kind: dict[str, dict[str, torch.Tensor]] = {"quantized": {}, "unquantized": {}}
    for key, logits in tensors.items():
        kind, _, name = key.partition("/")
        by_kind[kind][name] = logits
    return Recorded(goldens.load(folder / GOLDENS_NAME), FullLogits(**by_kind))
