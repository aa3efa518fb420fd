"""WAV files to samples: PCM of 8, 16, 24 and 32 bits and float of 32 and 64 bits, any number of channels.

Own reader, because the standard library's ``wave`` refuses float and, before Python 3.12, the extensible format.
Layout: "Multimedia Programming Interface and Data Specifications 1.0" (RIFF) and Microsoft's ``WAVEFORMATEXTENSIBLE``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from runners.errors import UserError

Samples = npt.NDArray[np.float32]

PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
RATES = range(1_000, 768_001)  # Hz; beyond these a header is damaged, not unusual
STREAMED = 0x7FFF_0000  # a program that writes into a pipe cannot know the size, and puts a number this large
CONVERT = "convert it, for example with: ffmpeg -i INPUT -ac 1 -ar 16000 OUTPUT.wav"
CONVERT_RAW = "if it holds raw samples, say which: ffmpeg -f s16le -ac 1 -ar 16000 -i INPUT OUTPUT.wav"
OTHER_FORMATS = {
    b"fLaC": "a FLAC file",
    b"OggS": "an Ogg file",
    b"ID3": "an MP3 file",
    b"\xff\xfb": "an MP3 file",
    b"RF64": "an RF64 file",
    b"RIFX": "a big-endian WAV file",
    b"FORM": "an AIFF file",
    b".snd": "an AU file",
}


@dataclass(frozen=True)
class Audio:
    """A recording in one channel."""

    samples: Samples  # [samples], float32; PCM lies in [-1, 1), float files are as they were stored
    sampling_rate: int  # Hz

    @property
    def seconds(self) -> float:
        """How long it is."""
        return len(self.samples) / self.sampling_rate


@dataclass(frozen=True)
class _Format:
    code: int
    channels: int
    rate: int
    bits: int


def read_wav(path: Path) -> Audio:
    """Read a WAV file. Several channels become their mean.

    Raises:
        UserError: the file cannot be read, is of another format, has no header (a ``.raw`` file), is cut short,
            holds no samples, or holds samples that are no numbers.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give the path of a WAV file.") from error
    if content[:4] != b"RIFF" or content[8:12] != b"WAVE":
        raise UserError(f"{path}: {_describe(content)}")
    layout, data = _chunks(path, content)
    frames = _decode(path, layout, data).reshape(-1, layout.channels)
    if not len(frames):
        raise UserError(f"{path}: holds no samples; record it again.")
    if not np.isfinite(frames).all():
        raise UserError(f"{path}: holds samples that are infinite or no numbers; {CONVERT}")
    return Audio(frames.mean(axis=1, dtype=np.float32), layout.rate)


def _describe(content: bytes) -> str:
    if not content:
        return "is empty, expected a WAV file; record it again."
    for magic, name in OTHER_FORMATS.items():
        if content.startswith(magic):
            return f"is {name}, expected a WAV file; {CONVERT}"
    return (
        "has no RIFF header, so neither its sampling rate nor the width of its samples is known; expected a WAV file; "
        f"{CONVERT_RAW}"
    )


def _chunks(path: Path, content: bytes) -> tuple[_Format, bytes]:
    """The format and the bytes of the samples. Other chunks are skipped."""
    layout: _Format | None = None
    at = 12
    while at + 8 <= len(content):
        name, size = struct.unpack_from("<4sI", content, at)
        body = content[at + 8 : at + 8 + size]
        if name == b"fmt ":
            layout = _format(path, body)
        elif name == b"data" and layout is not None:
            if len(body) < size < STREAMED:
                raise UserError(
                    f"{path}: is cut short: its header promises {size} bytes of samples, {len(body)} are there; "
                    "copy or record it again."
                )
            return layout, body
        at += 8 + size + size % 2  # chunks begin at even places
    raise UserError(f"{path}: has no {'samples' if layout else 'format'} in its header; copy or record it again.")


def _format(path: Path, body: bytes) -> _Format:
    if len(body) < 16:
        raise UserError(f"{path}: its format chunk has {len(body)} bytes, expected 16 or more; {CONVERT}")
    code, channels, rate, _, align, bits = struct.unpack_from("<HHIIHH", body)
    if code == EXTENSIBLE and len(body) >= 26:
        (code,) = struct.unpack_from("<H", body, 24)  # the sub-format's GUID begins with the code
    if (code, bits) not in DECODERS:
        known = ", ".join(f"{'float' if kind == FLOAT else 'PCM'} {width}" for kind, width in DECODERS)
        raise UserError(f"{path}: has samples of format {code} with {bits} bits; expected one of {known}: {CONVERT}")
    if rate not in RATES or channels == 0 or align != channels * bits // 8:
        raise UserError(
            f"{path}: its header is damaged ({channels} channels, {rate} Hz, {align} bytes a frame of {bits} bits); "
            "copy or record it again."
        )
    return _Format(code, channels, rate, bits)


def _decode(path: Path, layout: _Format, data: bytes) -> Samples:
    whole = len(data) - len(data) % (layout.channels * layout.bits // 8)
    return DECODERS[layout.code, layout.bits](data[:whole])


def _pcm8(data: bytes) -> Samples:
    middle = np.float32(128)  # the only width without a sign
    return (np.frombuffer(data, np.uint8).astype(np.float32) - middle) / middle


def _pcm16(data: bytes) -> Samples:
    return np.frombuffer(data, "<i2").astype(np.float32) / np.float32(2**15)


def _pcm24(data: bytes) -> Samples:
    widened = np.zeros((len(data) // 3, 4), np.uint8)
    widened[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)  # the upper three bytes: the sign comes by itself
    return widened.reshape(-1).view("<i4").astype(np.float32) / np.float32(2**31)  # 24 bits fit a float32 exactly


def _pcm32(data: bytes) -> Samples:
    return np.frombuffer(data, "<i4").astype(np.float32) / np.float32(2**31)


def _float32(data: bytes) -> Samples:
    return np.frombuffer(data, "<f4").astype(np.float32)


def _float64(data: bytes) -> Samples:
    return np.frombuffer(data, "<f8").astype(np.float32)


DECODERS: dict[tuple[int, int], Callable[[bytes], Samples]] = {
    (PCM, 8): _pcm8,
    (PCM, 16): _pcm16,
    (PCM, 24): _pcm24,
    (PCM, 32): _pcm32,
    (FLOAT, 32): _float32,
    (FLOAT, 64): _float64,
}
