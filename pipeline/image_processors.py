"""transformers' image processors as steps of the runners: one function a kind of processor.

A row is right when the runner's result equals that of transformers' Pillow class; the tests compare each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from PIL.Image import Resampling
from transformers.image_processing_backends import PilBackend

from runners.errors import UserError
from runners.preprocessing import (
    Channels,
    ExactSize,
    ImagePreprocessing,
    LongestEdge,
    Resample,
    Resize,
    ShortestEdge,
    Size,
)

WARP_FROM = 384  # pixels: ConvNeXT resizes without a crop from here on
LEVIT_MARGIN = 256 / 224
IDEFICS_LARGEST = 4096  # pixels: Idefics 3 scales larger results down once more
RESAMPLES: dict[Resampling, Resample] = {
    Resampling.NEAREST: "nearest",
    Resampling.BOX: "box",
    Resampling.BILINEAR: "bilinear",
    Resampling.HAMMING: "hamming",
    Resampling.BICUBIC: "bicubic",
    Resampling.LANCZOS: "lanczos",
}


class UnsupportedOption(UserError):  # noqa: N818 - the caller names the file, then it is an error
    """An option of a processor that no step of the runners does."""

    def __init__(self, option: str, reason: str) -> None:
        super().__init__(f"'{option}' {reason}")
        self.option = option
        self.reason = reason


def _plain(processor: PilBackend) -> ImagePreprocessing:
    return _steps(processor, _resizes(processor), _crop(processor))


def _segmentation(processor: PilBackend) -> ImagePreprocessing:
    return _steps(processor, _resizes(processor), None)  # Segformer has no crop, whatever its file says


def _mobilevit(processor: PilBackend) -> ImagePreprocessing:
    channels = "bgr" if processor.do_flip_channel_order else "rgb"
    steps = _steps(processor, _resizes(processor), _crop(processor))
    return steps.model_copy(update={"channels": channels, "mean": None, "std": None})  # it never normalises


def _levit(processor: PilBackend) -> ImagePreprocessing:
    resizes = tuple(
        ShortestEdge(edge=int(LEVIT_MARGIN * resize.edge)) if isinstance(resize, ShortestEdge) else resize
        for resize in _resizes(processor)
    )
    return _steps(processor, resizes, _crop(processor))


def _convnext(processor: PilBackend) -> ImagePreprocessing:
    if processor.do_center_crop:
        raise UnsupportedOption("do_center_crop", "is not supported with this processor, which crops by 'crop_pct'")
    if not processor.do_resize:
        return _steps(processor, (), None)
    edge = processor.size.shortest_edge
    if not edge:
        raise UnsupportedOption("size", f"{dict(processor.size)} is not supported; supported: shortest_edge")
    if not 0 < processor.crop_pct <= 1:
        raise UnsupportedOption("crop_pct", f"{processor.crop_pct} is not supported; supported: above 0, up to 1")
    if edge >= WARP_FROM:
        return _steps(processor, (ExactSize(height=edge, width=edge),), None)
    return _steps(processor, (ShortestEdge(edge=int(edge / processor.crop_pct)),), Size(height=edge, width=edge))


def _idefics(processor: PilBackend) -> ImagePreprocessing:
    """Idefics 3 and SmolVLM without splitting: one square image. Their class adds a dimension: ``[1, 1, 3, H, W]``."""
    if processor.do_image_splitting:
        raise UnsupportedOption("do_image_splitting", "true is not supported; supported: false, one image a picture")
    tile = dict(processor.max_image_size).get("longest_edge")
    if not tile:
        raise UnsupportedOption(
            "max_image_size", f"{processor.max_image_size} is not supported; supported: longest_edge"
        )
    square = ExactSize(height=tile, width=tile)
    if not processor.do_resize:
        return _steps(processor, (square,), None)
    size = processor.size
    if size.longest_edge and size.longest_edge <= IDEFICS_LARGEST:
        return _steps(processor, (LongestEdge(edge=size.longest_edge), square), None)
    if size.height and size.width:
        return _steps(processor, (ExactSize(height=size.height, width=size.width), square), None)
    raise UnsupportedOption(
        "size", f"{dict(size)} is not supported; supported: longest_edge up to {IDEFICS_LARGEST}, or height and width"
    )


PROCESSORS: dict[str, Callable[[PilBackend], ImagePreprocessing]] = {
    "BeitImageProcessor": _plain,
    "BitImageProcessor": _plain,
    "BlipImageProcessor": _plain,
    "CLIPImageProcessor": _plain,
    "ChineseCLIPImageProcessor": _plain,
    "ConvNextImageProcessor": _convnext,
    "DeiTImageProcessor": _plain,
    "Idefics3ImageProcessor": _idefics,
    "LevitImageProcessor": _levit,
    "MobileNetV1ImageProcessor": _plain,
    "MobileNetV2ImageProcessor": _plain,
    "MobileViTImageProcessor": _mobilevit,
    "OwlViTImageProcessor": _plain,
    "PvtImageProcessor": _plain,
    "SegformerImageProcessor": _segmentation,
    "SiglipImageProcessor": _plain,
    "SmolVLMImageProcessor": _idefics,
    "ViTImageProcessor": _plain,
}


def _steps(processor: PilBackend, resizes: tuple[Resize, ...], crop: Size | None) -> ImagePreprocessing:
    if processor.do_pad and processor.pad_size is not None:
        raise UnsupportedOption("pad_size", f"{dict(processor.pad_size)} is not supported; supported: no padding")
    mean = _channels(processor.image_mean) if processor.do_normalize else None
    return ImagePreprocessing(
        resizes=resizes,
        resample=_resample(processor.resample),
        crop=crop,
        rescale=processor.rescale_factor if processor.do_rescale else None,
        mean=mean,
        std=_channels(processor.image_std) if processor.do_normalize else None,
    )


def _resizes(processor: PilBackend) -> tuple[Resize, ...]:
    if not processor.do_resize:
        return ()
    given = dict(processor.size)
    if set(given) == {"height", "width"}:
        return (ExactSize(height=given["height"], width=given["width"]),)
    if set(given) == {"shortest_edge"}:
        return (ShortestEdge(edge=given["shortest_edge"]),)
    raise UnsupportedOption("size", f"{given} is not supported; supported: height and width, or shortest_edge")


def _crop(processor: PilBackend) -> Size | None:
    if not processor.do_center_crop:
        return None
    given = dict(processor.crop_size or {})
    if set(given) != {"height", "width"}:
        raise UnsupportedOption("crop_size", f"{given} is not supported; supported: height and width")
    return Size(height=given["height"], width=given["width"])


def _resample(given: int | None) -> Resample:
    if given is None:
        return "bilinear"  # what transformers takes then
    try:
        return RESAMPLES[Resampling(given)]
    except ValueError as error:
        known = ", ".join(f"{number.value} ({name})" for number, name in RESAMPLES.items())
        raise UnsupportedOption("resample", f"{given!r} is not supported; supported: {known}") from error


def _channels(given: float | Iterable[float]) -> Channels:
    values = tuple(given) if isinstance(given, Iterable) else (given,) * 3
    if len(values) != 3:
        raise UnsupportedOption("image_mean or image_std", f"{list(values)} is not supported; supported: 3 channels")
    return (values[0], values[1], values[2])
