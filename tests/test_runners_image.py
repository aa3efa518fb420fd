"""Image files, and what a vision model takes of them."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError
from transformers.image_processing_backends import PilBackend
from transformers.models.idefics3.image_processing_pil_idefics3 import get_resize_output_image_size

from runners.errors import UserError
from runners.image import center_crop, preprocess, read_image, target_size
from runners.preprocessing import ExactSize, ImagePreprocessing, LongestEdge, ShortestEdge, Size

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RESAMPLES = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}


def picture(width: int, height: int, seed=0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BOX)


def settings(**values) -> ImagePreprocessing:
    fields = {"resizes": (), "resample": "bilinear", "crop": None, "rescale": 1 / 255, "mean": None, "std": None}
    return ImagePreprocessing(**{**fields, **values})


SIZES = [(64, 48), (48, 64), (33, 97), (20, 20), (224, 5)]
STEPS = {
    "exact": (
        {"resizes": (ExactSize(height=32, width=40),)},
        {"do_resize": True, "size": {"height": 32, "width": 40}},
    ),
    "shortest edge": (
        {"resizes": (ShortestEdge(edge=31),)},
        {"do_resize": True, "size": {"shortest_edge": 31}, "default_to_square": False},
    ),
    "crop": ({"crop": Size(height=17, width=18)}, {"do_center_crop": True, "crop_size": {"height": 17, "width": 18}}),
    "crop of a smaller image": (
        {"crop": Size(height=51, width=70)},
        {"do_center_crop": True, "crop_size": {"height": 51, "width": 70}},
    ),
    "all": (
        {"resizes": (ShortestEdge(edge=40),), "crop": Size(height=32, width=32), "mean": MEAN, "std": STD},
        {
            "do_resize": True,
            "size": {"shortest_edge": 40},
            "do_center_crop": True,
            "crop_size": {"height": 32, "width": 32},
            "do_normalize": True,
            "image_mean": MEAN,
            "image_std": STD,
        },
    ),
    "without rescaling": (
        {"rescale": None, "mean": (120.0, 110.0, 100.0), "std": (60.0, 61.0, 62.0)},
        {"do_rescale": False, "do_normalize": True, "image_mean": (120, 110, 100), "image_std": (60, 61, 62)},
    ),
}


@pytest.mark.parametrize("resample", RESAMPLES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("ours", "theirs"), STEPS.values(), ids=STEPS)
def test_the_steps_are_those_of_transformers(ours, theirs, size, resample):
    image = picture(*size)
    processor = PilBackend(**{"do_rescale": True, "resample": RESAMPLES[resample], **theirs})
    expected = processor(image, return_tensors="pt").pixel_values
    actual = preprocess(image, settings(resample=resample, **ours))
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected.float(), atol=1e-6, rtol=0)


def test_a_known_pixel():
    image = Image.new("RGB", (2, 2), (255, 0, 51))
    result = preprocess(image, settings(mean=(0.5, 0.5, 0.2), std=(0.5, 0.25, 0.1)))
    torch.testing.assert_close(result[0, :, 1, 1], torch.tensor([1.0, -2.0, 0.0]), atol=1e-6, rtol=0)
    assert result.shape == (1, 3, 2, 2)
    swapped = preprocess(image, settings(channels="bgr"))
    torch.testing.assert_close(swapped[0, :, 0, 0], torch.tensor([0.2, 0.0, 1.0]))


def test_crops_keep_the_middle_and_pad_with_black():
    pixels = np.arange(1, 6, dtype=np.uint8).reshape(1, 5, 1).repeat(3, axis=2)
    assert center_crop(pixels, Size(height=1, width=3))[0, :, 0].tolist() == [2, 3, 4]
    padded = center_crop(pixels, Size(height=3, width=7))
    assert padded[1, :, 0].tolist() == [0, 1, 2, 3, 4, 5, 0]
    assert padded[0].sum() == padded[2].sum() == 0


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(2, 4096))
def test_the_longest_edge_is_that_of_idefics(height, width, edge):
    size = target_size(Size(height=height, width=width), LongestEdge(edge=edge))
    # a view: only its shape is looked at
    expected = get_resize_output_image_size(np.broadcast_to(np.uint8(0), (3, height, width)), edge)
    assert (size.height, size.width) == expected


@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 300))
def test_the_shortest_edge_has_the_length_asked_for(height, width, edge):
    size = target_size(Size(height=height, width=width), ShortestEdge(edge=edge))
    assert min(size.height, size.width) == edge
    assert (size.height <= size.width) == (height <= width) or size.height == size.width


def test_the_size_of_results_is_known_where_it_does_not_depend_on_the_image():
    crop, exact, shortest = Size(height=5, width=6), ExactSize(height=7, width=8), ShortestEdge(edge=9)
    assert settings(resizes=(shortest,), crop=crop).output_size == crop
    assert settings(resizes=(shortest, exact)).output_size == Size(height=7, width=8)
    assert settings(resizes=(exact, shortest)).output_size is None
    assert settings().output_size is None


def test_settings_survive_json():
    given_settings = settings(
        resizes=(LongestEdge(edge=20), ShortestEdge(edge=9), ExactSize(height=1, width=2)), mean=MEAN, std=STD
    )
    assert ImagePreprocessing.model_validate_json(given_settings.model_dump_json()) == given_settings


@pytest.mark.parametrize(
    "values",
    [
        {"mean": MEAN},
        {"std": STD},
        {"mean": MEAN, "std": (1.0, 0.0, 1.0)},
        {"crop": {"height": 0, "width": 1}},
        {"resizes": ({"mode": "shortest", "edge": 3},)},
        {"resample": "cubic"},
    ],
)
def test_settings_that_make_no_sense_are_refused(values):
    with pytest.raises(ValidationError):
        settings(**values)


def saved(tmp_path, image: Image.Image, name: str, **options):
    path = tmp_path / name
    image.save(path, **options)
    return path


@pytest.mark.parametrize("name", ["a.png", "a.jpg"])
def test_files_are_read_as_rgb(tmp_path, name):
    image = Image.new("RGB", (9, 5), (200, 100, 50))
    result = read_image(saved(tmp_path, image, name))
    assert result.mode == "RGB"
    assert result.size == (9, 5)
    assert np.abs(np.asarray(result).astype(int) - [200, 100, 50]).max() <= 3


def test_a_photo_taken_sideways_is_turned_upright(tmp_path):
    image = Image.new("RGB", (20, 10), "black")
    image.paste("white", (0, 0, 10, 10))  # the left half
    exif = Image.Exif()
    exif[0x0112] = 6  # turn clockwise by a quarter
    result = read_image(saved(tmp_path, image, "a.png", exif=exif))
    assert result.size == (10, 20)
    assert result.getpixel((5, 2)) == (255, 255, 255)
    assert result.getpixel((5, 17)) == (0, 0, 0)


def transparent_palette() -> Image.Image:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putdata([0, 1])
    return image


def test_transparent_parts_become_white(tmp_path):
    image = Image.new("RGBA", (2, 1), (10, 20, 30, 255))
    image.putpixel((1, 0), (10, 20, 30, 0))
    result = read_image(saved(tmp_path, image, "a.png"))
    assert [result.getpixel((x, 0)) for x in range(2)] == [(10, 20, 30), (255, 255, 255)]
    palette = read_image(saved(tmp_path, transparent_palette(), "b.png", transparency=0))
    assert [palette.getpixel((x, 0)) for x in range(2)] == [(255, 255, 255), (40, 50, 60)]


def test_grey_and_sixteen_bits_keep_their_brightness(tmp_path):
    grey = read_image(saved(tmp_path, Image.new("L", (2, 2), 77), "a.png"))
    assert grey.getpixel((0, 0)) == (77, 77, 77)
    deep = Image.fromarray(np.full((2, 2), 77 * 256 + 250, np.uint16))
    assert read_image(saved(tmp_path, deep, "b.png")).getpixel((0, 0)) == (77, 77, 77)


def png() -> bytes:
    stream = io.BytesIO()
    picture(40, 30).save(stream, "PNG")
    return stream.getvalue()


def jpeg() -> bytes:
    stream = io.BytesIO()
    picture(40, 30).save(stream, "JPEG")
    return stream.getvalue()


BROKEN = {
    "empty": b"",
    "text": b"not an image",
    "png cut short": png()[:-200],
    "png cut in the header": png()[:20],
    "png with a changed byte": png()[:60] + bytes([png()[60] ^ 0xFF]) + png()[61:],
    "jpeg cut short": jpeg()[:-200],
    "bmp": b"BM" + bytes(60),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_refused_by_name(tmp_path, content):
    path = tmp_path / "a.png"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.png: not a readable PNG or JPEG image"):
        read_image(path)


def test_a_missing_file_and_a_directory_are_named(tmp_path):
    with pytest.raises(UserError, match=r"none\.png: does not exist"):
        read_image(tmp_path / "none.png")
    with pytest.raises(UserError, match="not a readable PNG"):
        read_image(tmp_path)


def test_a_file_that_unpacks_to_too_many_pixels_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    path = tmp_path / "a.png"
    path.write_bytes(png())  # 1200 pixels: more than twice the limit
    with pytest.raises(UserError, match=r"a\.png: has more pixels than are decoded"):
        read_image(path)


def test_a_large_photo_is_read_without_a_warning(tmp_path, monkeypatch, recwarn):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    path = tmp_path / "a.png"
    path.write_bytes(png())
    assert read_image(path).size == (40, 30)
    assert not recwarn.list
