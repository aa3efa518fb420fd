"""The task of a model, from the architecture that its config names."""

from __future__ import annotations

import difflib

from transformers import PreTrainedConfig

from pipeline.tasks import TASKS, Task
from runners.errors import UserError
from runners.manifest import TaskName


def infer_task(config: PreTrainedConfig, given: TaskName | None) -> TaskName:
    """The task that the configuration gives, or that of the model's architecture.

    A config that names no architecture is of the first task that has a model class for it.

    Raises:
        UserError: the architecture is of no task that is supported.
    """
    if given is not None:
        return given
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return "text-generation"
    named = (config.architectures or [None])[0]
    for task in TASKS.values():
        if (named or _class_of(config, task)) in task.architectures():
            return task.name
    name = named or type(config).__name__
    known = {name for task in TASKS.values() for name in task.architectures()}
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.3)
    raise UserError(
        f"model.source: the architecture {name} is not supported; supported are {len(known)} architectures of "
        f"transformers, for {', '.join(TASKS)} (nearest: {', '.join(close) or 'LlamaForCausalLM'})"
    )


def _class_of(config: PreTrainedConfig, task: Task) -> str | None:
    """The class that the task would load such a config with; of several the first."""
    mapping = task.auto_model._model_mapping
    if type(config) not in mapping:
        return None
    found = mapping[type(config)]
    return str((found[0] if isinstance(found, tuple) else found).__name__)
