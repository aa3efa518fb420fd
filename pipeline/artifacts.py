"""What the stages hand to each other: frozen, each named by what has been done to it."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from runners.manifest import ModelIdentity, Tokenizer


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer as the package keeps it: texts, without the library that made them."""

    tokenizer_json: str  # of the ``tokenizers`` library; neither truncates nor pads
    chat_template: str | None  # jinja2
    info: Tokenizer


@dataclass(frozen=True)
class Loaded:
    """A model ready to be quantized, and where it came from."""

    model: PreTrainedModel  # float32, in evaluation mode, without gradients
    identity: ModelIdentity
    tokenizer: LoadedTokenizer | None  # None: the source has none
