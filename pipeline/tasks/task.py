"""A task: what a kind of model does, hence how it is loaded, which methods its program has, and how it is checked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import JsonValue
from transformers import PreTrainedConfig
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from pipeline.artifacts import Extras, Loaded, ProgramFacts, Quantized, Registered
from pipeline.config import BuildSettings, CacheSettings, CheckSettings, ExportSettings
from pipeline.record import Recorded
from pipeline.tasks.plan import MethodPlan
from pipeline.tasks.settings import DECODER
from runners.manifest import TaskName

Constants = dict[str, int | bool | list[int]]


def no_extras(_folder: Path | None, _config: PreTrainedConfig) -> Extras:
    """The extras of a task that needs none."""
    return Extras()


@dataclass(frozen=True)
class Task:
    """One row of ``TASKS``.

    Args:
        name: as ``model.task`` gives it.
        auto_model: transformers' class whose ``from_pretrained`` loads such a model.
        architectures: names of the model classes that are of this task.
        needs_tokenizer: whether a package of it is of no use without one.
        register: gives the model its cache; for a model without one ``Registered.cache`` is None.
        plan: how each method is traced.
        constant_methods: the program's constants, for apps that read them.
        is_checked: whether the configuration gives the check anything to do.
        draft: what the program itself writes along the check's prompts, which saves eager PyTorch time; None: nothing.
        record: what eager PyTorch says.
        prepare: makes the check's inputs, so that what is wrong with them is found before the long stages; returns
            what tells them from others.
        extras: what a runner needs beside program and tokenizer, from the model's folder (None: it is one file).
        settings: dotted keys of the configuration that the task reads, of those that some tasks read and others do not.
        unread: beginnings of the names of weights that no method of the task reads: a checkpoint may lack them.
    """

    name: TaskName
    auto_model: type[_BaseAutoModelClass]
    architectures: Callable[[], Collection[str]]
    needs_tokenizer: bool
    register: Callable[[Quantized, CacheSettings, ExportSettings], Registered]
    plan: Callable[[Registered, ExportSettings], list[MethodPlan]]
    constant_methods: Callable[[Loaded, ProgramFacts], Constants]
    is_checked: Callable[[CheckSettings], bool]
    draft: Callable[[Loaded, BuildSettings, Path], Sequence[torch.Tensor]] | None
    record: Callable[[Loaded, Quantized, BuildSettings, Sequence[torch.Tensor] | None], Recorded]
    prepare: Callable[[Loaded, BuildSettings], JsonValue]
    extras: Callable[[Path | None, PreTrainedConfig], Extras] = no_extras
    settings: Collection[str] = DECODER
    unread: tuple[str, ...] = ()
