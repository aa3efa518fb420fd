"""What is done to a recording, an image or hidden states around a program: the settings, as a manifest holds them.

``runners.audio``, ``runners.image`` and ``runners.pooling`` do it. Every model here is JSON, immutable, and refuses
unknown keys.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator
from typing_extensions import Self

from runners.strict import Strict

Resample = Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]
Channels = tuple[float, float, float]  # red, green, blue; in the order in which the model takes them


class LogMel(Strict):
    """Whisper's features: float32 ``[1, feature_size, frames]``, of a recording padded or cut to ``n_samples``."""

    kind: Literal["log_mel"] = "log_mel"
    sampling_rate: PositiveInt  # Hz
    feature_size: PositiveInt  # mel bands
    n_fft: PositiveInt  # samples of a window
    hop_length: PositiveInt  # samples from one window to the next
    n_samples: PositiveInt  # samples that the model sees: 30 s

    @property
    def frames(self) -> int:
        """Windows of one recording: the last dimension of the features."""
        return self.n_samples // self.hop_length

    @property
    def seconds(self) -> float:
        """Seconds of a recording that the features cover; the rest is cut off."""
        return self.n_samples / self.sampling_rate


class Waveform(Strict):
    """Moonshine's and Wav2Vec2's features: the samples themselves, float32 ``[1, samples]``."""

    kind: Literal["waveform"] = "waveform"
    sampling_rate: PositiveInt  # Hz
    normalize: bool  # to mean 0 and variance 1


AudioPreprocessing = Annotated[LogMel | Waveform, Field(discriminator="kind")]


class ExactSize(Strict):
    """Resize to this size, whatever the aspect ratio was. Pixels."""

    mode: Literal["exact"] = "exact"
    height: PositiveInt
    width: PositiveInt


class ShortestEdge(Strict):
    """Resize so that the shorter edge has ``edge`` pixels and the aspect ratio stays."""

    mode: Literal["shortest_edge"] = "shortest_edge"
    edge: PositiveInt


class LongestEdge(Strict):
    """Resize so that the longer edge has ``edge`` pixels; the other edge becomes even (as Idefics 3 does it)."""

    mode: Literal["longest_edge"] = "longest_edge"
    edge: PositiveInt


Resize = Annotated[ExactSize | ShortestEdge | LongestEdge, Field(discriminator="mode")]


class Size(Strict):
    """Height and width in pixels."""

    height: PositiveInt
    width: PositiveInt


class ImagePreprocessing(Strict):
    """From an RGB image to float32 ``[1, 3, H, W]``. The steps run in the order of the fields."""

    kind: Literal["image"] = "image"
    resizes: tuple[Resize, ...]
    resample: Resample
    crop: Size | None  # from the centre; where the image is smaller it is padded with black
    rescale: PositiveFloat | None  # factor on values of 0 to 255
    mean: Channels | None  # subtracted after rescaling
    std: Channels | None  # divided by after that
    channels: Literal["rgb", "bgr"] = "rgb"

    @model_validator(mode="after")
    def _check_normalization(self) -> Self:
        if (self.mean is None) != (self.std is None):
            raise ValueError("mean and std belong together: give both or neither")
        if self.std is not None and min(self.std) <= 0:
            raise ValueError(f"std must be above 0, got {list(self.std)}")
        return self

    @property
    def output_size(self) -> Size | None:
        """The size of every result; None where it depends on the image's aspect ratio."""
        if self.crop is not None:
            return self.crop
        last = self.resizes[-1] if self.resizes else None
        return Size(height=last.height, width=last.width) if isinstance(last, ExactSize) else None


class Pooling(Strict):
    """From an encoder's hidden states to one vector a text."""

    mode: Literal["mean", "cls", "max"]
    normalize: bool  # to Euclidean length 1
