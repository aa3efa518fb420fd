"""What models do: one module a task, and its row here."""

from __future__ import annotations

from pipeline.tasks.task import Task
from pipeline.tasks.text_generation import TEXT_GENERATION

TASKS: dict[str, Task] = {task.name: task for task in (TEXT_GENERATION,)}

__all__ = ["TASKS", "Task"]
