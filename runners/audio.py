"""Recordings to what a speech model takes: resampled samples, or Whisper's log-mel spectrogram.

Formulas: Slaney's mel scale and area normalisation (Auditory Toolbox, 1998), and Whisper's scaling of its logarithm
(Radford et al., 2022). Float32 throughout, with torch's own Fourier transform, as transformers' extractor does it:
quiet bands of a loud recording depend on the rounding.
"""

from __future__ import annotations

from functools import cache
from math import ceil, gcd

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import sliding_window_view

from runners.preprocessing import LogMel, Waveform
from runners.wav import Audio, Samples

Float64 = npt.NDArray[np.float64]

# Resampling filter: flat up to 90% of the lower rate's Nyquist frequency, 95 dB down at 100% (see `resample`).
ZERO_CROSSINGS = 64
CUTOFF = 0.95
KAISER_BETA = 10.0

MEL_TOP = 8000.0  # Hz: Whisper's highest band ends here at any sampling rate
MEL_LINEAR = 200.0 / 3.0  # Hz a mel below 1 kHz
MEL_KNEE = 15.0  # mel of 1 kHz
MEL_STEP = np.log(6.4) / 27.0  # logarithm of frequency a mel above 1 kHz
POWER_FLOOR = 1e-10
DYNAMIC_RANGE = 8.0  # decades below the loudest value
VARIANCE_FLOOR = 1e-7


def features(audio: Audio, settings: LogMel | Waveform) -> torch.Tensor:
    """What the model takes of a recording, resampled first where its rate differs.

    Returns:
        float32 ``[1, feature_size, frames]`` or ``[1, samples]``.
    """
    samples = resample(audio.samples, audio.sampling_rate, settings.sampling_rate)
    return log_mel(samples, settings) if isinstance(settings, LogMel) else waveform(samples, settings)


def log_mel(samples: Samples, settings: LogMel) -> torch.Tensor:
    """Whisper's features of samples that have the model's sampling rate.

    Longer recordings are cut off behind ``settings.n_samples``, shorter ones padded with silence.

    Args:
        samples: float32 ``[samples]``.
        settings: rates and sizes.

    Returns:
        float32 ``[1, feature_size, frames]``: log10 of the power in each mel band, at most eight decades below the
        loudest value, then ``(x + 4) / 4``.
    """
    fitted = torch.zeros(settings.n_samples)
    kept = samples[: settings.n_samples]
    fitted[: len(kept)] = torch.from_numpy(np.ascontiguousarray(kept, np.float32))
    window = torch.hann_window(settings.n_fft)
    spectrum = torch.stft(fitted, settings.n_fft, settings.hop_length, window=window, return_complex=True)
    power = spectrum[:, : settings.frames].abs().square()
    bands = torch.from_numpy(mel_filters(settings.feature_size, settings.n_fft, settings.sampling_rate)) @ power
    logarithm = bands.clamp(min=POWER_FLOOR).log10()
    floored = torch.maximum(logarithm, logarithm.max() - DYNAMIC_RANGE)
    return ((floored + 4.0) / 4.0).unsqueeze(0)


def waveform(samples: Samples, settings: Waveform) -> torch.Tensor:
    """The samples as a batch of one, normalised to mean 0 and variance 1 where the model wants it.

    Args:
        samples: float32 ``[samples]`` at the model's sampling rate.
        settings: whether to normalise.

    Returns:
        float32 ``[1, samples]``.
    """
    values = samples.astype(np.float32)
    if settings.normalize:
        values = (values - values.mean()) / np.sqrt(values.var() + VARIANCE_FLOOR)
    return torch.from_numpy(values).unsqueeze(0)


@cache
def mel_filters(bands: int, n_fft: int, sampling_rate: int) -> Samples:
    """Triangular filters from 0 to 8 kHz, evenly spaced on Slaney's mel scale, each of the same area.

    Returns:
        float32 ``[bands, n_fft // 2 + 1]``. Do not write into it: calls share it.
    """
    top = MEL_KNEE + np.log(MEL_TOP / 1000.0) / MEL_STEP
    edges = _hertz(np.linspace(0.0, top, bands + 2))
    bins = np.linspace(0.0, sampling_rate // 2, n_fft // 2 + 1)
    low, centre, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    triangles = np.minimum((bins - low) / (centre - low), (high - bins) / (high - centre))
    return (np.maximum(triangles, 0.0) * 2.0 / (high - low)).astype(np.float32)


def _hertz(mels: Float64) -> Float64:
    above = 1000.0 * np.exp(MEL_STEP * (mels - MEL_KNEE))
    return np.where(mels < MEL_KNEE, mels * MEL_LINEAR, above)


def resample(samples: Samples, from_rate: int, to_rate: int) -> Samples:
    """Change the sampling rate with a windowed sinc, evaluated once for each phase of the two rates.

    64 zero crossings a side under a Kaiser window of beta 10, in float64. Tones up to 90% of the lower rate's
    Nyquist frequency keep their level within 0.001 dB; what lies above that frequency is weakened by 95 dB or more,
    aliases included. Beyond its ends a recording counts as silence.

    Args:
        samples: float32 ``[samples]``.
        from_rate: their rate in Hz.
        to_rate: the rate wanted.

    Returns:
        float32 ``[ceil(samples * to_rate / from_rate)]``; the same array where the rates are equal.
    """
    if from_rate == to_rate:
        return samples
    common = gcd(from_rate, to_rate)
    up, down = to_rate // common, from_rate // common
    scale = CUTOFF * min(1.0, up / down)
    half = ceil(ZERO_CROSSINGS / scale)
    offsets = np.arange(-half, half + 2, dtype=np.float64)
    windows = sliding_window_view(np.pad(samples.astype(np.float64), (half, half + 1 + down)), len(offsets))
    result = np.empty(ceil(len(samples) * up / down), np.float32)
    for phase in range(min(up, len(result))):
        # output `phase + k * up` lies `fraction` behind input sample `first + k * down`
        first, fraction = phase * down // up, phase * down % up / up
        taps = _low_pass(offsets - fraction, scale)
        places = result[phase::up]
        places[:] = windows[first::down][: len(places)] @ (taps / taps.sum())
    return result


def _low_pass(offsets: Float64, scale: float) -> Float64:
    """A sinc of cut-off ``scale`` (1: the Nyquist frequency) at ``offsets`` in samples, under a Kaiser window."""
    inside = np.clip(1.0 - (offsets * scale / ZERO_CROSSINGS) ** 2, 0.0, None)
    window = np.where(inside > 0, np.i0(KAISER_BETA * np.sqrt(inside)), 0.0)
    return np.asarray(np.sinc(offsets * scale) * window, np.float64)
