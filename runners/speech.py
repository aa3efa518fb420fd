"""Recordings of any length to what ``encode`` takes: one piece after the other."""

from __future__ import annotations

import numpy as np
import torch

from runners.audio import log_mel, resample, waveform
from runners.preprocessing import AudioPreprocessing, LogMel
from runners.wav import Audio, Samples


def pieces(audio: Audio, settings: AudioPreprocessing, shortest: int, longest: int) -> list[torch.Tensor]:
    """The features of each piece of a recording, cut where the model's input ends: a word there may be cut in two.

    Args:
        audio: the recording.
        settings: how its features are made.
        shortest: samples of a piece at least, of a model that takes samples: a shorter one is followed by silence.
        longest: samples of a piece at most, of a model that takes samples.

    Returns:
        float32 ``[1, feature_size, frames]`` or ``[1, samples]`` each; of an empty recording one piece of silence.
    """
    samples = resample(audio.samples, audio.sampling_rate, settings.sampling_rate)
    if isinstance(settings, LogMel):
        return [log_mel(part, settings) for part in _parts(samples, settings.n_samples)]
    parts = [np.pad(part, (0, max(0, shortest - len(part)))) for part in _parts(samples, longest)]
    return [waveform(part, settings) for part in parts]


def _parts(samples: Samples, size: int) -> list[Samples]:
    return [samples[start : start + size] for start in range(0, max(1, len(samples)), size)]
