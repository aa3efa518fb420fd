"""Models that read images beside text: which part of each makes features of an image, and what its prompts hold.

H, W size of an image in pixels, T features that one image becomes, D their width (that of the text's embeddings).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel

from pipeline.quiet import quiet_transformers
from runners.errors import UserError
from runners.manifest import ImagePrompt

FEATURES = "features"

Features = Callable[[PreTrainedModel, torch.Tensor], Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class Vision:
    """How a kind of model reads images.

    Args:
        features: of one image, ``[1, T, D]``, from float32 ``[1, 3, H, W]``: what the model's forward computes of it.
        images_axis: whether the forward's ``pixel_values`` have an axis of images before that of channels.
        before: tokens that stand before an image's features in a prompt.
        after: tokens that stand after them.
    """

    features: Features
    images_axis: bool = False
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    def pixel_values(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return float32 ``[1, 3, H, W]`` as the model's forward takes it."""
        return pixels.unsqueeze(0) if self.images_axis else pixels


def vision_of(config: PreTrainedConfig) -> Vision:
    """Return the row of the model's kind; most have ``get_image_features``."""
    return _ROWS.get(config.model_type, Vision(_of_the_model))


def image_size(config: PreTrainedConfig) -> tuple[int, int]:
    """Return height and width of the images that the vision tower was made for.

    Raises:
        UserError: the config states none, as of a model that takes images of any size.
    """
    stated = getattr(getattr(config, "vision_config", None), "image_size", None)
    if isinstance(stated, int):
        return stated, stated
    if isinstance(stated, list | tuple) and len(stated) == 2:
        return int(stated[0]), int(stated[1])
    raise UserError(
        f"model: the config of this {config.model_type} states no vision_config.image_size; a program takes images of "
        "one size."
    )


def read_image_prompt(folder: Path, config: PreTrainedConfig) -> ImagePrompt:
    """Return what one image becomes in a prompt.

    Args:
        folder: of the model, with its tokenizer.
        config: of the model.

    Raises:
        UserError: the config names no token for images, or the tokenizer lacks a token that stands around them.
    """
    token: int | None = getattr(config, "image_token_id", None)
    if token is None:
        raise UserError(f"{folder}: config.json names no image_token_id, the token that stands for images; add it.")
    row = vision_of(config)
    ids = _ids(folder, (*row.before, *row.after)) if row.before or row.after else []
    return ImagePrompt(token_id=token, before=ids[: len(row.before)], after=ids[len(row.before) :])


def _ids(folder: Path, tokens: tuple[str, ...]) -> list[int]:
    with quiet_transformers():
        vocabulary = AutoTokenizer.from_pretrained(folder, local_files_only=True).get_vocab()
    missing = [token for token in tokens if token not in vocabulary]
    if missing:
        raise UserError(
            f"{folder}: the tokenizer has no {', '.join(missing)}, which this kind of model has around its images; add "
            "the tokenizer that came with it."
        )
    return [vocabulary[token] for token in tokens]


def _of_the_model(model: PreTrainedModel, pixels: torch.Tensor) -> Mapping[str, torch.Tensor]:
    parameters = inspect.signature(model.get_image_features).parameters.values()
    needed = [each.name for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
    if others := [name for name in needed if name != "pixel_values"]:
        raise UserError(
            f"model: {type(model).__name__} makes features of an image's pixels and of {', '.join(others)}; a program "
            "takes pixels of one size, and nothing besides."
        )
    found = model.get_image_features(pixel_values=pixels)
    found = getattr(found, "pooler_output", found)  # of every model since transformers 5
    rows = found[0] if isinstance(found, list | tuple) else found
    return {FEATURES: rows.reshape(1, -1, rows.shape[-1])}


def _idefics(model: PreTrainedModel, pixels: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """The tower and the connector, without what drops images that are black: their number is no size of a graph."""
    hidden = model.model.vision_model(pixel_values=pixels).last_hidden_state
    return {FEATURES: model.model.connector(hidden)}


_AROUND = "<fake_token_around_image>"
_IDEFICS = Vision(_idefics, images_axis=True, before=(_AROUND, "<global-img>"), after=(_AROUND,))
_ROWS = {"idefics3": _IDEFICS, "smolvlm": _IDEFICS}
