"""What a row of each task is held to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel

from runners.manifest import TaskName
from runners.package import Package
from tests.zoo import encoder_decoders, encoders, multimodal, text_generation


@dataclass(frozen=True)
class Proof:
    """How a task's programs are compared with eager PyTorch.

    Args:
        prove: given the model and its program; raises where they differ.
        says: what that is, for the page.
    """

    prove: Callable[[PreTrainedModel, Package], None]
    says: str


_ANSWERS = Proof(encoder_decoders.prove, encoder_decoders.SAYS)
_TEXTS = Proof(encoders.prove_text, encoders.TEXT_SAYS)
PROOFS: dict[TaskName, Proof] = {
    "text-generation": Proof(text_generation.prove, text_generation.SAYS),
    "text2text": _ANSWERS,
    "speech-to-text": _ANSWERS,
    "embedding": _TEXTS,
    "fill-mask": _TEXTS,
    "image-classification": Proof(encoders.prove_image, encoders.IMAGE_SAYS),
    "image-text-to-text": Proof(multimodal.prove, multimodal.SAYS),
}
