"""Image files to what a vision model takes. H height, W width, in pixels.

Pillow decodes and resizes, on 8-bit values, as transformers' image processors of the same kind do; its torchvision
processors resize by another implementation, and differ by up to some 1/255 a pixel.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageOps

from runners.errors import UserError
from runners.preprocessing import ExactSize, ImagePreprocessing, LongestEdge, ShortestEdge, Size

FORMATS = ("PNG", "JPEG")

Pixels = npt.NDArray[np.uint8]


def read_image(path: Path) -> Image.Image:
    """Read a PNG or JPEG file, upright, as RGB. Transparent parts become white.

    Raises:
        UserError: the file cannot be read, is no PNG or JPEG, is damaged or cut short, or is too large to decode.
    """
    try:
        with warnings.catch_warnings():
            # Pillow warns of photos above some 90 million pixels, and refuses twice that
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(path, formats=FORMATS) as image:
                image.load()
                return _rgb(ImageOps.exif_transpose(image))
    except FileNotFoundError as error:
        raise UserError(f"{path}: does not exist; give the path of a PNG or JPEG file.") from error
    except Image.DecompressionBombError as error:
        raise UserError(f"{path}: has more pixels than are decoded ({error}); make it smaller.") from error
    # decoders fail on damaged files with OSError, SyntaxError, ValueError, struct.error and others
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{path}: not a readable PNG or JPEG image ({reason}); convert or fetch the file again."
        ) from error


def preprocess(image: Image.Image, settings: ImagePreprocessing) -> torch.Tensor:
    """What the model takes of an image: resized, cropped, rescaled, normalised.

    Args:
        image: RGB, as ``read_image`` gives it.
        settings: the steps.

    Returns:
        float32 ``[1, 3, H, W]``.
    """
    for resize in settings.resizes:
        size = target_size(Size(height=image.height, width=image.width), resize)
        image = image.resize((size.width, size.height), Image.Resampling[settings.resample.upper()])
    pixels = np.asarray(image)
    if settings.crop is not None:
        pixels = center_crop(pixels, settings.crop)
    factor = 1.0 if settings.rescale is None else settings.rescale
    values = np.multiply(pixels, factor, dtype=np.float64).astype(np.float32)
    if settings.channels == "bgr":
        values = values[..., ::-1]
    if settings.mean is not None and settings.std is not None:
        values = (values - np.array(settings.mean, np.float32)) / np.array(settings.std, np.float32)
    return torch.from_numpy(np.ascontiguousarray(values.transpose(2, 0, 1))).unsqueeze(0)


def target_size(size: Size, resize: ExactSize | ShortestEdge | LongestEdge) -> Size:
    """The size of an image of ``size`` after ``resize``; edges that follow the aspect ratio are rounded down."""
    if isinstance(resize, ExactSize):
        return Size(height=resize.height, width=resize.width)
    short, long = sorted((size.height, size.width))
    if isinstance(resize, ShortestEdge):
        short, long = resize.edge, int(resize.edge * long / short)
    else:
        # through the ratio, in this order: it rounds as transformers does
        ratio = size.width / size.height
        other = int(resize.edge / ratio) if size.width >= size.height else int(resize.edge * ratio)
        short, long = max(other + other % 2, 1), resize.edge
    return Size(height=short, width=long) if size.width >= size.height else Size(height=long, width=short)


def center_crop(pixels: Pixels, size: Size) -> Pixels:
    """The middle of an image, with black around it where the image is smaller.

    Args:
        pixels: uint8 ``[H, W, 3]``.
        size: of the result.

    Returns:
        uint8 ``[size.height, size.width, 3]``.
    """
    result = np.zeros((size.height, size.width, pixels.shape[2]), np.uint8)
    from_rows, to_rows = _overlap(pixels.shape[0], size.height)
    from_columns, to_columns = _overlap(pixels.shape[1], size.width)
    result[to_rows, to_columns] = pixels[from_rows, from_columns]
    return result


def _overlap(length: int, wanted: int) -> tuple[slice, slice]:
    """Which part of an edge is kept, and where it goes."""
    start = (length - wanted) // 2  # below 0 where the image is smaller
    kept = min(length, wanted)
    return slice(max(start, 0), max(start, 0) + kept), slice(max(-start, 0), max(-start, 0) + kept)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        # 16-bit grey: Pillow's own conversion would turn everything above 255 white
        image = Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")
