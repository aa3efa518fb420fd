"""What a model's ``preprocessor_config.json`` or ``processor_config.json`` asks for, as settings of the runners.

transformers' own class fills in what a file leaves out; the image processors that are known are in
``pipeline.image_processors``.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import transformers
from pydantic import JsonValue, ValidationError
from transformers import SequenceFeatureExtractor
from transformers.image_processing_backends import PilBackend
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

from pipeline.image_processors import PROCESSORS, UnsupportedOption
from pipeline.json_files import read_object
from pipeline.quiet import quiet_transformers
from runners.errors import UserError
from runners.preprocessing import AudioPreprocessing, ImagePreprocessing, LogMel, Waveform

NESTED, PLAIN, MODEL = "processor_config.json", "preprocessor_config.json", "config.json"
AUDIO_TYPES = ("WhisperFeatureExtractor", "Wav2Vec2FeatureExtractor")
# Keys that are no options: of transformers' own bookkeeping, or what a class writes about itself.
BOOKKEEPING = {
    "image_processor_type",
    "feature_extractor_type",
    "processor_class",
    "auto_map",
    "use_fast",
    "backend",
    "transformers_version",
    "_valid_processor_keys",
    "n_samples",
    "nb_max_frames",
    "mel_filters",
    "padding_side",
    "return_attention_mask",
}

P = TypeVar("P")


@dataclass(frozen=True)
class _Section:
    """The configuration of one preprocessor, and where it stands."""

    file: Path
    prefix: str  # of its keys in messages
    values: dict[str, JsonValue]

    def refuse(self, option: str, reason: str) -> UserError:
        return UserError(f"{self.file}: '{self.prefix}{option}' {reason}")


def read_audio_preprocessing(folder: Path) -> AudioPreprocessing:
    """The features of a speech model.

    Raises:
        UserError: the folder names no feature extractor, one that is not supported, or an option that is not.
    """
    section = _section(folder, "feature_extractor")
    name = _type_of(folder, section, "feature_extractor_type", FEATURE_EXTRACTOR_MAPPING_NAMES.get)
    if name not in AUDIO_TYPES:
        raise section.refuse("feature_extractor_type", f"{name} is not supported; supported: {', '.join(AUDIO_TYPES)}")
    extractor: SequenceFeatureExtractor = _instance(section, getattr(transformers, name))
    _require_silence(section, extractor)
    with _explained(section):
        return _log_mel(extractor, section) if name == AUDIO_TYPES[0] else _waveform(extractor, section)


def read_image_preprocessing(folder: Path, *, split_images: bool | None = None) -> ImagePreprocessing:
    """The preprocessing of a vision model's images.

    The settings are those of transformers' Pillow processor of the type. A batch of one is assumed: padding to the
    largest image of a batch is none.

    Args:
        folder: of the model.
        split_images: in place of the file's ``do_image_splitting``, where the processor has that option. Only False
            is supported: one square image, whatever its size. Its prompt has to be made accordingly.

    Raises:
        UserError: the folder names no image processor, one that is not supported, or an option that is not.
    """
    section = _section(folder, "image_processor")
    name = _type_of(folder, section, "image_processor_type", _image_processor_of)
    if name not in PROCESSORS:
        raise section.refuse("image_processor_type", f"{name} is not supported; supported: {', '.join(PROCESSORS)}")
    kind = getattr(transformers, f"{name}Pil")
    if split_images is not None and hasattr(kind, "do_image_splitting"):
        section.values["do_image_splitting"] = split_images
    processor: PilBackend = _instance(section, kind)
    with _explained(section):
        return PROCESSORS[name](processor)


@contextmanager
def _explained(section: _Section) -> Iterator[None]:
    """Turns what is wrong with an option into a message with its file."""
    try:
        yield
    except UnsupportedOption as error:
        raise section.refuse(error.option, error.reason) from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise section.refuse(place, f"is not usable: {first['msg']}, got {first['input']!r}") from error


def _section(folder: Path, key: str) -> _Section:
    """The nested section of ``processor_config.json`` goes before ``preprocessor_config.json``, as in transformers."""
    if (folder / NESTED).is_file():
        nested = read_object(folder / NESTED).get(key)
        if isinstance(nested, dict):
            return _Section(folder / NESTED, f"{key}.", dict(nested))
    if (folder / PLAIN).is_file():
        return _Section(folder / PLAIN, "", read_object(folder / PLAIN))
    raise UserError(f"{folder}: has neither {PLAIN} nor '{key}' in {NESTED}; add the file that came with the model")


def _type_of(folder: Path, section: _Section, key: str, of_model: Callable[[str], str | None]) -> str:
    """The name of the preprocessor's class, without what names the library behind it. Old files name it otherwise."""
    given = section.values.get(key)
    if given is None and key == "image_processor_type":
        given = section.values.get("feature_extractor_type")
    if given is None and (folder / MODEL).is_file():
        given = of_model(str(read_object(folder / MODEL).get("model_type")))
    if not isinstance(given, str):
        raise section.refuse(key, f"is missing, and the model type of {MODEL} implies none; add it")
    if key == "image_processor_type":
        given = given.replace("FeatureExtractor", "ImageProcessor").removesuffix("Fast").removesuffix("Pil")
    return given


def _image_processor_of(model_type: str) -> str | None:
    entry: dict[str, str] = IMAGE_PROCESSOR_MAPPING_NAMES.get(model_type, {})
    return entry.get("torchvision") or entry.get("pil")


def _instance(section: _Section, kind: type[P]) -> P:
    _warn_of_idle(section, kind)
    try:
        with quiet_transformers():
            return kind(**section.values)
    # each class refuses values of the wrong kind in a way of its own
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{section.file}: cannot be read as a preprocessor: {reason}") from error


def _warn_of_idle(section: _Section, kind: type[P]) -> None:
    """transformers takes any key and ignores those that its class does not know: likely, but not surely, harmless."""
    options = getattr(kind, "valid_kwargs", None)
    known = set(options.__annotations__ if options else inspect.signature(kind).parameters)
    for option in sorted(set(section.values) - known - BOOKKEEPING):
        message = f"{section.file}: '{section.prefix}{option}' is not an option of {kind.__name__}, and has no effect"
        warnings.warn(message, stacklevel=2)


def _require_silence(section: _Section, extractor: SequenceFeatureExtractor) -> None:
    if extractor.padding_value != 0.0:
        raise section.refuse("padding_value", f"{extractor.padding_value} is not supported; supported: 0.0")
    if extractor.padding_side != "right":
        raise section.refuse("padding_side", f"{extractor.padding_side} is not supported; supported: right")


def _log_mel(extractor: SequenceFeatureExtractor, section: _Section) -> LogMel:
    if extractor.dither != 0.0:
        raise section.refuse("dither", f"{extractor.dither} adds noise and is not supported; supported: 0.0")
    return LogMel(
        sampling_rate=extractor.sampling_rate,
        feature_size=extractor.feature_size,
        n_fft=extractor.n_fft,
        hop_length=extractor.hop_length,
        n_samples=extractor.n_samples,
    )


def _waveform(extractor: SequenceFeatureExtractor, section: _Section) -> Waveform:
    if extractor.feature_size != 1:
        raise section.refuse("feature_size", f"{extractor.feature_size} is not supported; supported: 1, one channel")
    if section.values.get("processor_class") == "MoonshineStreamingProcessor":
        raise section.refuse(
            "processor_class", "MoonshineStreamingProcessor pads recordings to whole frames, which is not supported"
        )
    return Waveform(sampling_rate=extractor.sampling_rate, normalize=extractor.do_normalize)
