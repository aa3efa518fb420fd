"""What models do: one module a task, and its row here."""

from __future__ import annotations

from pipeline.tasks.embedding import EMBEDDING
from pipeline.tasks.fill_mask import FILL_MASK
from pipeline.tasks.image_classification import IMAGE_CLASSIFICATION
from pipeline.tasks.image_text_to_text import IMAGE_TEXT_TO_TEXT
from pipeline.tasks.speech_to_text import SPEECH_TO_TEXT
from pipeline.tasks.task import Task
from pipeline.tasks.text2text import TEXT2TEXT
from pipeline.tasks.text_generation import TEXT_GENERATION

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        TEXT_GENERATION,
        SPEECH_TO_TEXT,
        TEXT2TEXT,
        IMAGE_TEXT_TO_TEXT,
        FILL_MASK,
        EMBEDDING,
        IMAGE_CLASSIFICATION,
    )
}

__all__ = ["TASKS", "Task"]
