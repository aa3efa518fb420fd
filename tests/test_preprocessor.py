"""Preprocessor files of a model folder as settings of the runners."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from pipeline.image_processors import PROCESSORS
from pipeline.preprocessor import read_audio_preprocessing, read_image_preprocessing
from runners.audio import log_mel, waveform
from runners.errors import UserError
from runners.image import preprocess
from runners.preprocessing import ExactSize, ImagePreprocessing, LogMel, ShortestEdge, Size, Waveform

WHISPER = LogMel(sampling_rate=16000, feature_size=80, n_fft=400, hop_length=160, n_samples=480_000)


def folder_with(tmp_path, values, name="preprocessor_config.json"):
    (tmp_path / name).write_text(values if isinstance(values, str) else json.dumps(values))
    return tmp_path


# What is small enough to compare quickly, or differs from the class's defaults.
VARIANTS = {
    "Idefics3ImageProcessor": [
        {"do_image_splitting": False, "size": {"longest_edge": 90}, "max_image_size": {"longest_edge": 64}},
        {
            "do_image_splitting": False,
            "size": {"height": 40, "width": 70},
            "max_image_size": {"longest_edge": 64},
        },
        {"do_image_splitting": False, "do_resize": False},
    ],
    "SmolVLMImageProcessor": [
        {"do_image_splitting": False, "size": {"longest_edge": 91}, "max_image_size": {"longest_edge": 32}}
    ],
    "ConvNextImageProcessor": [{}, {"size": {"shortest_edge": 224}}, {"size": 64, "crop_pct": 0.9}],
    "LevitImageProcessor": [{}, {"size": {"height": 40, "width": 50}}],
    "MobileViTImageProcessor": [{}, {"do_flip_channel_order": False}],
    "SegformerImageProcessor": [{"do_center_crop": True, "crop_size": 7}],
    "CLIPImageProcessor": [{}, {"size": 48, "crop_size": 40, "resample": 2, "do_convert_rgb": True}],
    "ViTImageProcessor": [{}, {"size": 48, "resample": 3, "do_normalize": False}, {"do_resize": None, "do_pad": True}],
    "DeiTImageProcessor": [{}, {"do_center_crop": False, "image_mean": 0.4, "image_std": 0.3}],
}
CASES = [(name, options) for name in PROCESSORS for options in VARIANTS.get(name, [{}])]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_every_processor_does_what_transformers_does(tmp_path, name, options):
    folder = folder_with(tmp_path, {"image_processor_type": name, **options})
    settings = read_image_preprocessing(folder)
    processor = getattr(transformers, f"{name}Pil").from_pretrained(folder)
    for width, height in [(120, 80), (77, 131), (40, 40)]:
        pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
        image = Image.fromarray(pixels)
        expected = torch.as_tensor(np.asarray(processor(image, return_tensors="np")["pixel_values"]))
        actual = preprocess(image, settings)
        torch.testing.assert_close(actual, expected.reshape(actual.shape).float(), atol=1e-6, rtol=0)
        assert settings.output_size in (None, Size(height=actual.shape[2], width=actual.shape[3]))


def test_a_saved_processor_is_read_back(tmp_path):
    transformers.SiglipImageProcessorPil(size={"height": 30, "width": 31}).save_pretrained(tmp_path)
    settings = read_image_preprocessing(tmp_path)
    assert settings.resizes == (ExactSize(height=30, width=31),)
    assert settings.resample == "bicubic"


def test_old_names_of_a_processor_are_known(tmp_path):
    expected = read_image_preprocessing(folder_with(tmp_path, {"image_processor_type": "ViTImageProcessor"}))
    for values in [
        {"image_processor_type": "ViTImageProcessorFast"},
        {"image_processor_type": "ViTFeatureExtractor"},
        {"feature_extractor_type": "ViTFeatureExtractor"},
    ]:
        assert read_image_preprocessing(folder_with(tmp_path, values)) == expected


def test_a_file_without_a_type_takes_that_of_the_model(tmp_path):
    folder_with(tmp_path, {"model_type": "mobilevit"}, "config.json")
    folder_with(tmp_path, {"size": {"shortest_edge": 40}})
    settings = read_image_preprocessing(tmp_path)
    assert settings.channels == "bgr"
    assert settings.resizes == (ShortestEdge(edge=40),)
    folder_with(tmp_path, {"model_type": "whisper"}, "config.json")
    folder_with(tmp_path, {"feature_size": 128})
    assert read_audio_preprocessing(tmp_path) == WHISPER.model_copy(update={"feature_size": 128})


def test_a_nested_section_goes_before_the_file_of_its_own(tmp_path):
    nested = {
        "image_processor": {"image_processor_type": "DeiTImageProcessor", "size": {"height": 9, "width": 8}},
        "feature_extractor": {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "do_normalize": False},
        "processor_class": "SomeProcessor",
    }
    folder_with(tmp_path, nested, "processor_config.json")
    folder_with(tmp_path, {"image_processor_type": "ViTImageProcessor"})
    assert read_image_preprocessing(tmp_path).resizes == (ExactSize(height=9, width=8),)
    assert read_audio_preprocessing(tmp_path) == Waveform(sampling_rate=16000, normalize=False)
    folder_with(tmp_path, {"processor_class": "SomeProcessor"}, "processor_config.json")
    assert read_image_preprocessing(tmp_path).resizes == (ExactSize(height=224, width=224),)


@pytest.mark.parametrize("name", ["SmolVLMImageProcessor", "Idefics3ImageProcessor"])
def test_splitting_is_refused_and_can_be_switched_off(tmp_path, name):
    folder = folder_with(tmp_path, {"image_processor_type": name, "max_image_size": {"longest_edge": 64}})
    with pytest.raises(UserError, match=r"preprocessor_config\.json: 'do_image_splitting' true is not supported"):
        read_image_preprocessing(folder)
    settings = read_image_preprocessing(folder, split_images=False)
    assert settings.output_size == Size(height=64, width=64)


IMAGE_REFUSALS = {
    "type": ({"image_processor_type": "DonutImageProcessor"}, "image_processor_type' Donut.* supported: .*ViTImage"),
    "size": ({"size": {"shortest_edge": 5, "longest_edge": 9}}, "'size' .*longest_edge.*supported: height and width"),
    "resample": ({"resample": 9}, r"'resample' 9 is not supported; supported: 0 \(nearest\)"),
    "pad": ({"do_pad": True, "pad_size": {"height": 9, "width": 9}}, "'pad_size' .*supported: no padding"),
    "channels": ({"image_mean": [0.5, 0.5]}, "'image_mean or image_std' .* 3 channels"),
    "std": ({"image_std": [0.5, 0.0, 0.5]}, "std must be above 0"),
    "edge": ({"size": {"height": -3, "width": 4}}, "'height' .*greater than 0.*-3"),
    "text": ({"size": "large"}, "cannot be read as a preprocessor"),
    "crop_pct": ({"image_processor_type": "ConvNextImageProcessor", "crop_pct": 0}, "'crop_pct' 0 is not supported"),
    "tile": (
        {"image_processor_type": "SmolVLMImageProcessor", "do_image_splitting": False, "max_image_size": {"width": 5}},
        "'max_image_size' .* supported: longest_edge",
    ),
    "no json": ("{", "not readable as JSON"),
    "no object": ("[]", "expected a JSON object"),
}


@pytest.mark.parametrize(("values", "message"), IMAGE_REFUSALS.values(), ids=IMAGE_REFUSALS)
def test_what_no_step_does_is_refused(tmp_path, values, message):
    values = values if isinstance(values, str) else {"image_processor_type": "ViTImageProcessor", **values}
    with pytest.raises(UserError, match=rf"preprocessor_config\.json: .*{message}"):
        read_image_preprocessing(folder_with(tmp_path, values))


def test_an_option_without_effect_is_named(tmp_path):
    folder = folder_with(tmp_path, {"image_processor_type": "ViTImageProcessor", "do_flip_channel_order": True})
    with pytest.warns(UserWarning, match="'do_flip_channel_order' is not an option of ViTImageProcessorPil"):
        read_image_preprocessing(folder)


def test_saved_files_give_no_warnings(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for name in PROCESSORS:
            getattr(transformers, f"{name}Pil")().save_pretrained(tmp_path)
            assert isinstance(read_image_preprocessing(tmp_path, split_images=False), ImagePreprocessing)
        for extractor in (transformers.WhisperFeatureExtractor(), transformers.Wav2Vec2FeatureExtractor()):
            extractor.save_pretrained(tmp_path)
            read_audio_preprocessing(tmp_path)


@pytest.mark.parametrize("options", [{}, {"feature_size": 128}, {"chunk_length": 4, "hop_length": 200, "n_fft": 512}])
def test_whisper_files_give_its_features(tmp_path, options):
    extractor = transformers.WhisperFeatureExtractor(**options)
    extractor.save_pretrained(tmp_path)
    settings = read_audio_preprocessing(tmp_path)
    samples = np.random.default_rng(0).normal(scale=0.1, size=30_000).astype(np.float32)
    expected = extractor(samples, sampling_rate=16000, return_tensors="pt").input_features
    torch.testing.assert_close(log_mel(samples, settings), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("normalize", [False, True])
def test_moonshine_files_give_the_samples(tmp_path, normalize):
    extractor = transformers.Wav2Vec2FeatureExtractor(do_normalize=normalize, return_attention_mask=True)
    extractor.save_pretrained(tmp_path)
    settings = read_audio_preprocessing(tmp_path)
    assert settings == Waveform(sampling_rate=16000, normalize=normalize)
    samples = np.random.default_rng(0).normal(scale=0.1, size=3000).astype(np.float32)
    expected = extractor(samples, sampling_rate=16000, return_tensors="pt").input_values
    torch.testing.assert_close(waveform(samples, settings), expected, atol=1e-5, rtol=0)


WHISPER_TYPE, RAW_TYPE = "WhisperFeatureExtractor", "Wav2Vec2FeatureExtractor"
AUDIO_REFUSALS = {
    "type": ({"feature_extractor_type": "DacFeatureExtractor"}, "DacFeatureExtractor is not .*WhisperFeatureExtractor"),
    "no type": ({"feature_size": 80}, "'feature_extractor_type' is missing"),
    "dither": ({"feature_extractor_type": WHISPER_TYPE, "dither": 0.1}, "'dither' 0.1 adds noise.*supported: 0.0"),
    "padding": ({"feature_extractor_type": WHISPER_TYPE, "padding_value": 1.0}, "'padding_value' 1.0 is not"),
    "side": ({"feature_extractor_type": RAW_TYPE, "padding_side": "left"}, "'padding_side' left is not"),
    "channels": ({"feature_extractor_type": RAW_TYPE, "feature_size": 2}, "'feature_size' 2 is not"),
    "hop": ({"feature_extractor_type": WHISPER_TYPE, "hop_length": "a"}, "cannot be read as a preprocessor"),
    "half a hop": ({"feature_extractor_type": WHISPER_TYPE, "hop_length": 80.5}, "'hop_length' is not usable.*80.5"),
    "streaming": (
        {"feature_extractor_type": RAW_TYPE, "processor_class": "MoonshineStreamingProcessor"},
        "'processor_class' MoonshineStreamingProcessor pads",
    ),
}


@pytest.mark.parametrize(("values", "message"), AUDIO_REFUSALS.values(), ids=AUDIO_REFUSALS)
def test_audio_options_that_are_not_supported_are_refused(tmp_path, values, message):
    with pytest.raises(UserError, match=rf"preprocessor_config\.json: .*{message}"):
        read_audio_preprocessing(folder_with(tmp_path, values))


def test_messages_name_the_nested_key(tmp_path):
    nested = {"feature_extractor": {"feature_extractor_type": WHISPER_TYPE, "dither": 0.1}}
    with pytest.raises(UserError, match=r"processor_config\.json: 'feature_extractor\.dither'"):
        read_audio_preprocessing(folder_with(tmp_path, nested, "processor_config.json"))


def test_a_folder_without_files_says_so(tmp_path):
    with pytest.raises(UserError, match=r"has neither preprocessor_config\.json nor 'image_processor'"):
        read_image_preprocessing(tmp_path)
