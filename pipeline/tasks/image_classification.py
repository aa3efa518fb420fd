"""Image classifiers: ``forward`` takes one preprocessed image and gives a logit a label.

H height, W width in pixels, C labels. Contract: ``(pixels float32 [1, 3, H, W]) -> logits float32 [1, C]``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from pydantic import JsonValue
from transformers import AutoModelForImageClassification, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

from pipeline.artifacts import Extras, Loaded, Quantized, Registered
from pipeline.cases import Case, Output, identity_of, record_cases
from pipeline.config import BuildSettings, CheckSettings, ExportSettings
from pipeline.preprocessor import read_image_preprocessing
from pipeline.record import Recorded
from pipeline.tasks.plan import MethodPlan
from pipeline.tasks.settings import IMAGE
from pipeline.tasks.task import Task
from pipeline.tasks.text_encoder import no_constants, without_cache
from runners.caller import LOGITS, PIXELS
from runners.errors import UserError
from runners.image import preprocess, read_image
from runners.preprocessing import Size

_ARGUMENTS = {PIXELS: "pixel_values"}
_OUTPUT = Output(field="logits", name=LOGITS, kind="logits")
_RANDOM = 2  # inputs of noise in every check


def _architectures() -> Collection[str]:
    names = MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES.values()
    return {each for name in names for each in (name if isinstance(name, tuple) else (name,))}


def _extras(folder: Path | None, config: PreTrainedConfig) -> Extras:
    """The preprocessing of images, and the labels.

    Raises:
        UserError: the folder says not how images are prepared, or not to a size that suits the model.
    """
    if folder is None:
        raise UserError("model.source: a single file says not how images are prepared; give the model's folder.")
    image = read_image_preprocessing(folder)
    size = image.output_size
    if size is None:
        raise UserError(
            f"{folder}: its preprocessor gives images of the size that their aspect ratio asks for; expected one size "
            "for all (a crop, or height and width), as the program takes one."
        )
    stated = getattr(config, "image_size", None)
    wanted = (stated, stated) if isinstance(stated, int) else tuple(stated or (size.height, size.width))
    if wanted != (size.height, size.width):
        raise UserError(
            f"{folder}: its preprocessor gives images of {size.height} x {size.width} pixels, its config says "
            f"{' x '.join(map(str, wanted))} (image_size); correct one of the two."
        )
    labels = config.id2label or {}
    named = [labels[index] for index in range(len(labels))] if set(labels) == set(range(len(labels))) else None
    return Extras(image=image, labels=named)


def plan(registered: Registered, _settings: ExportSettings) -> list[MethodPlan]:
    """Return how ``forward`` is traced: for one image, of the size that the preprocessor gives."""
    size = _size(registered.extras)
    return [
        MethodPlan(
            name="forward",
            kwargs={"pixel_values": torch.zeros(1, 3, size.height, size.width)},
            dynamic_shapes={"pixel_values": None},
            input_names={"pixel_values": PIXELS},
            outputs=(_OUTPUT.field,),
        )
    ]


def _cases(loaded: Loaded, settings: BuildSettings) -> list[Case]:
    """The images of the configuration, and noise.

    Raises:
        UserError: an image cannot be read.
    """
    image, size = loaded.extras.image, _size(loaded.extras)
    assert image is not None
    row = torch.zeros(1, dtype=torch.int64)
    given = [(str(n), str(path), preprocess(read_image(path), image)) for n, path in enumerate(settings.check.images)]
    generator = torch.Generator().manual_seed(0)
    for number in range(_RANDOM):
        noise = torch.randn(1, 3, size.height, size.width, generator=generator)
        given.append((f"random {number}", "<noise>", noise))
    return [Case(name, text, {PIXELS: pixels}, row) for name, text, pixels in given]


def _size(extras: Extras) -> Size:
    assert extras.image is not None and extras.image.output_size is not None, "seen to when the model was loaded"
    return extras.image.output_size


def _is_checked(_check: CheckSettings) -> bool:
    return True  # noise needs no setting


def _prepare(loaded: Loaded, settings: BuildSettings) -> JsonValue:
    return identity_of(_cases(loaded, settings))


def _record(
    loaded: Loaded, quantized: Quantized, settings: BuildSettings, _drafts: Sequence[torch.Tensor] | None
) -> Recorded:
    return record_cases(loaded, quantized, _cases(loaded, settings), _ARGUMENTS, _OUTPUT)


IMAGE_CLASSIFICATION = Task(
    name="image-classification",
    auto_model=AutoModelForImageClassification,
    architectures=_architectures,
    needs_tokenizer=False,
    register=without_cache,
    plan=plan,
    constant_methods=no_constants,
    is_checked=_is_checked,
    draft=None,
    record=_record,
    prepare=_prepare,
    extras=_extras,
    settings=IMAGE,
)
