"""WAV files, resampling, and the features of speech models."""

from __future__ import annotations

import math
import struct
import wave

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Wav2Vec2FeatureExtractor, WhisperFeatureExtractor

from runners.audio import features, log_mel, mel_filters, resample, waveform
from runners.errors import UserError
from runners.preprocessing import LogMel, Waveform
from runners.wav import Audio, read_wav

WHISPER = LogMel(sampling_rate=16000, feature_size=80, n_fft=400, hop_length=160, n_samples=480_000)
SOUND = np.random.default_rng(0).uniform(-0.9, 0.9, 2000)
EXTENSIBLE_TAIL = bytes.fromhex("000000001000800000aa00389b71")  # of the GUID, behind the code


def wav_bytes(
    data: bytes, code=1, channels=1, rate=16000, bits=16, *, extensible=False, before=b"", size: int | None = None
) -> bytes:
    align = channels * bits // 8
    fmt = struct.pack("<HHIIHH", 0xFFFE if extensible else code, channels, rate, rate * align, align, bits)
    if extensible:
        fmt += struct.pack("<HHIH", 22, bits, 0, code) + EXTENSIBLE_TAIL
    chunks = before + b"fmt " + struct.pack("<I", len(fmt)) + fmt
    chunks += b"data" + struct.pack("<I", len(data) if size is None else size) + data
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def stored(tmp_path, content: bytes, name="a.wav"):
    path = tmp_path / name
    path.write_bytes(content)
    return path


def pcm24(values) -> bytes:
    return b"".join(int(v).to_bytes(3, "little", signed=True) for v in values)


# name -> code, bits, bytes, largest distance to SOUND
ENCODINGS = {
    "pcm 8": (1, 8, (np.round(SOUND * 128) + 128).astype(np.uint8).tobytes(), 1 / 256),
    "pcm 16": (1, 16, np.round(SOUND * 2**15).astype("<i2").tobytes(), 2**-16),
    "pcm 24": (1, 24, pcm24(np.round(SOUND * 2**23)), 2**-23),
    "pcm 32": (1, 32, np.round(SOUND * 2**31).astype("<i4").tobytes(), 2**-23),
    "float 32": (3, 32, SOUND.astype("<f4").tobytes(), 2**-23),
    "float 64": (3, 64, SOUND.astype("<f8").tobytes(), 2**-23),
}


@pytest.mark.parametrize("extensible", [False, True])
@pytest.mark.parametrize(("code", "bits", "data", "distance"), ENCODINGS.values(), ids=ENCODINGS)
def test_every_encoding_gives_the_same_sound(tmp_path, code, bits, data, distance, extensible):
    audio = read_wav(stored(tmp_path, wav_bytes(data, code, bits=bits, rate=22050, extensible=extensible)))
    assert audio.samples.dtype == np.float32
    assert audio.sampling_rate == 22050
    assert audio.samples.shape == SOUND.shape
    assert np.abs(audio.samples - SOUND).max() <= distance * 1.01


def test_a_file_of_the_standard_library_is_read(tmp_path):
    values = np.array([0, 16384, -32768, 32767], "<i2")
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(values.tobytes())
    audio = read_wav(tmp_path / "a.wav")
    assert audio.samples.tolist() == [0.0, 0.5, -1.0, 32767 / 32768]
    assert audio.seconds == 4 / 8000


def test_channels_become_their_mean(tmp_path):
    left, right = np.array([8192, -8192], "<i2"), np.array([16384, 8192], "<i2")
    data = np.stack([left, right], axis=1).tobytes()
    assert read_wav(stored(tmp_path, wav_bytes(data, channels=2))).samples.tolist() == [0.375, 0.0]


def test_other_chunks_are_skipped_odd_ones_too(tmp_path):
    before = b"LIST" + struct.pack("<I", 3) + b"abc\0"
    assert len(read_wav(stored(tmp_path, wav_bytes(b"\1\0" * 5, before=before))).samples) == 5


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0x7FFFF000])
def test_a_size_written_into_a_pipe_means_the_rest(tmp_path, size):
    assert len(read_wav(stored(tmp_path, wav_bytes(b"\1\0" * 5, size=size))).samples) == 5


REFUSED = {
    "raw samples": (b"\1\0" * 1000, "no RIFF header.*expected a WAV file.*ffmpeg -f s16le"),
    "flac": (b"fLaC" + bytes(50), "is a FLAC file.*ffmpeg"),
    "mp3": (b"ID3" + bytes(50), "is an MP3 file"),
    "empty file": (b"", "is empty"),
    "no samples": (wav_bytes(b""), "holds no samples"),
    "cut short": (wav_bytes(b"\1\0" * 5, size=100), "cut short.*100 bytes of samples, 10 are there"),
    "cut in the header": (wav_bytes(b"\1\0" * 5)[:30], "format chunk has 10 bytes"),
    "no data": (wav_bytes(b"")[:-8], "has no samples in its header"),
    "mu-law": (wav_bytes(b"\1" * 10, code=7, bits=8), "format 7 with 8 bits.*PCM 16"),
    "12 bits": (wav_bytes(b"\1" * 10, bits=12), "format 1 with 12 bits"),
    "no channels": (wav_bytes(b"\1\0", channels=0), "header is damaged"),
    "rate 0": (wav_bytes(b"\1\0", rate=0), "header is damaged"),
    "not a number": (wav_bytes(struct.pack("<2f", 0.5, math.nan), code=3, bits=32), "infinite or no numbers"),
}


@pytest.mark.parametrize(("content", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_recording_is_refused(tmp_path, content, message):
    path = stored(tmp_path, content, "a.raw")
    with pytest.raises(UserError, match=rf"a\.raw: .*{message}"):
        read_wav(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"none\.wav: cannot be read"):
        read_wav(tmp_path / "none.wav")


@given(st.binary(max_size=80))
def test_any_bytes_behind_a_header_give_samples_or_an_error(tmp_path_factory, tail):
    path = tmp_path_factory.mktemp("wav") / "a.wav"
    path.write_bytes(b"RIFF\0\0\0\0WAVE" + tail)
    try:
        audio = read_wav(path)
    except UserError as error:
        assert "a.wav" in str(error)
    else:
        assert len(audio.samples)


def tone(frequency: float, rate: int, seconds=0.5):
    return np.sin(2 * np.pi * frequency * np.arange(int(rate * seconds)) / rate).astype(np.float32)


def middle(samples):
    return samples[len(samples) // 4 : -len(samples) // 4]


def level(samples) -> float:
    return 10 * math.log10(2 * float(np.mean(middle(samples).astype(np.float64) ** 2)) + 1e-30)


RATES = [8000, 11025, 22050, 44100, 48000, 96000]


@pytest.mark.parametrize("rate", RATES)
def test_a_tone_below_the_limit_arrives_as_it_is(rate):
    frequency = 0.89 * min(rate, 16000) / 2
    result, expected = resample(tone(frequency, rate), rate, 16000), tone(frequency, 16000)
    assert result.dtype == np.float32
    assert abs(len(result) - len(expected)) <= 1
    assert np.abs(middle(result) - middle(expected)[: len(middle(result))]).max() < 2e-4
    assert abs(level(result)) < 0.001


@pytest.mark.parametrize("rate", [22050, 44100, 48000, 96000])
@pytest.mark.parametrize("frequency", [8001.0, 9000.0, 10500.0])
def test_a_tone_that_cannot_be_kept_does_not_come_back_as_another(rate, frequency):
    assert level(resample(tone(frequency, rate), rate, 16000)) < -95


@pytest.mark.parametrize("rate", RATES)
def test_a_constant_stays_the_same_constant(rate):
    result = resample(np.full(rate // 2, 0.5, np.float32), rate, 16000)
    assert np.abs(middle(result) - 0.5).max() < 1e-6


@given(st.integers(1, 60), st.sampled_from([8000, 15999, 16000, 44100, 48000]), st.sampled_from([8000, 16000]))
def test_the_length_follows_the_rates(length, from_rate, to_rate):
    result = resample(np.ones(length, np.float32), from_rate, to_rate)
    assert len(result) == math.ceil(length * to_rate / from_rate)
    assert np.isfinite(result).all()


def speech_like(seconds: float, seed: int):
    """Random noise in bursts: loud and quiet parts, as speech has them."""
    generator = np.random.default_rng(seed)
    noise = generator.normal(size=int(16000 * seconds)).astype(np.float32)
    loudness = 10.0 ** generator.uniform(-4, -0.5, size=len(noise) // 1600 + 1)
    return noise * np.repeat(loudness, 1600)[: len(noise)].astype(np.float32)


WHISPERS = {
    "tiny": {},
    "large-v3": {"feature_size": 128},
    "five seconds": {"chunk_length": 5},
    "other window": {"n_fft": 512, "hop_length": 128, "chunk_length": 3},
}
RECORDINGS = {
    "short": speech_like(0.7, 1),
    "cut": speech_like(31.3, 2),
    "one sample": np.array([0.5], np.float32),
    "silence": np.zeros(8000, np.float32),
    "tone": tone(440, 16000, 2.0),
}


@pytest.mark.parametrize("options", WHISPERS.values(), ids=WHISPERS)
@pytest.mark.parametrize("samples", RECORDINGS.values(), ids=RECORDINGS)
def test_log_mel_is_that_of_transformers(samples, options):
    extractor = WhisperFeatureExtractor(**options)
    settings = LogMel(
        sampling_rate=16000,
        feature_size=extractor.feature_size,
        n_fft=extractor.n_fft,
        hop_length=extractor.hop_length,
        n_samples=extractor.n_samples,
    )
    expected = extractor(samples, sampling_rate=16000, return_tensors="pt").input_features
    actual = log_mel(samples, settings)
    assert actual.dtype == torch.float32
    assert actual.shape == expected.shape == (1, settings.feature_size, settings.frames)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def test_the_mel_filters_are_those_of_transformers():
    for bands, n_fft, rate in [(80, 400, 16000), (128, 400, 16000), (40, 512, 22050)]:
        expected = WhisperFeatureExtractor(feature_size=bands, n_fft=n_fft, sampling_rate=rate).mel_filters.T
        np.testing.assert_allclose(mel_filters(bands, n_fft, rate), expected, atol=1e-8)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("samples", RECORDINGS.values(), ids=RECORDINGS)
def test_the_waveform_is_that_of_transformers(samples, normalize):
    extractor = Wav2Vec2FeatureExtractor(do_normalize=normalize)
    expected = extractor(samples, sampling_rate=16000, return_tensors="pt").input_values
    actual = waveform(samples, Waveform(sampling_rate=16000, normalize=normalize))
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def test_a_recording_of_another_rate_is_resampled_first():
    audio = Audio(tone(440, 44100, 1.0), 44100)
    plain = features(audio, Waveform(sampling_rate=16000, normalize=False))
    assert plain.shape == (1, 16000)
    mel = features(audio, WHISPER)
    assert mel.shape == (1, 80, 3000)
    direct = features(Audio(tone(440, 16000, 1.0), 16000), WHISPER)
    # the loudest band, where rounding does not matter: the tone lies where it lay
    assert mel[0, :, 50].argmax() == direct[0, :, 50].argmax()
    assert abs(float(mel[0, :, 50].max() - direct[0, :, 50].max())) < 1e-3


def test_features_leave_the_samples_alone():
    samples = speech_like(1.0, 3)
    before = samples.copy()
    features(Audio(samples, 16000), WHISPER)
    features(Audio(samples, 16000), Waveform(sampling_rate=16000, normalize=False)).add_(1)
    np.testing.assert_array_equal(samples, before)
