"""What the zoo says about a family of models, and what a run found out about one row of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from pipeline.artifacts import Extras
from pipeline.config import ExportSettings
from pipeline.tasks import TASKS
from runners.manifest import TaskName

Placement = Literal["buffer", "io", "none"]
Stage = Literal["export", "lower", "decode"]
SEED = 0


@dataclass(frozen=True)
class Cannot:
    """A thing that transformers or ExecuTorch cannot do, by the error that says so."""

    stage: Stage
    error: str  # a part of the message
    why: str  # in a few words, for the table


@dataclass(frozen=True)
class Family:
    """One architecture, small and random.

    Args:
        name: of the architecture, as transformers' folder has it.
        config: makes the configuration. Weights are drawn wide enough that greedy choices are no ties.
        task: one of ``TASKS``.
        export: settings that the family needs.
        extras: makes what a runner needs beside the program.
        encoder_length: the longest input of an encoder; None: what the model was made for.
        placements: of the cache, or none of a model without; a row each.
        ci: the placements of which every run of the tests builds a row.
        cannot: why no row of it works; None: all do.
        longer: why a program takes one token a call; None: it takes as many as its smallest window.
        why: for the table.
    """

    name: str
    config: Callable[[], PreTrainedConfig]
    task: TaskName = "text-generation"
    export: ExportSettings = field(default_factory=ExportSettings)
    extras: Callable[[], Extras] = Extras
    encoder_length: int | None = None
    placements: tuple[Placement, ...] = ("buffer", "io")
    ci: tuple[Placement, ...] = ()
    cannot: Cannot | None = None
    longer: Cannot | None = None
    why: str = ""

    def model(self) -> PreTrainedModel:
        """The model, the same weights each time. The global random state is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            model = TASKS[self.task].auto_model.from_config(self.config(), dtype=torch.float32)
        return model.eval().requires_grad_(False)


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    family: Family
    placement: Placement

    @property
    def key(self) -> str:
        """Names the row in the results and in pytest."""
        return f"{self.family.name}-{self.placement if self.placement != 'none' else self.family.task}"


@dataclass(frozen=True)
class Result:
    """What became of a row. Equal on every machine that has the same versions of the libraries."""

    task: str
    architecture: str = ""  # the model's class
    exports: bool = False
    lowers: bool = False
    decodes: bool = False
    cache: tuple[str, ...] = ()  # kinds of its tensors, as the manifest calls them
    attention: str = ""
    tokens_a_call: int = 0
    delegates: dict[str, int] = field(default_factory=dict)  # of each method
    undelegated: dict[str, dict[str, int]] = field(default_factory=dict)  # of each method, operator -> how often
    error: str | None = None  # of the stage that failed
