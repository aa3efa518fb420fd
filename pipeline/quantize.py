"""Stage: quantize the weights of a model, or leave them as they are."""

from __future__ import annotations

import copy

import torch

from pipeline.artifacts import Loaded, Quantized
from pipeline.config import QuantizeSettings
from pipeline.quantization.apply import quantize_weights


def quantize(loaded: Loaded, settings: QuantizeSettings, calibration: torch.Tensor | None = None) -> Quantized:
    """Return the model with its weights quantized; ``loaded.model`` stays as it is, and equal weights are shared.

    Args:
        loaded: gives the model.
        settings: name the schemes.
        calibration: ids of the calibration text, int64 ``[n]``.

    Raises:
        UserError: a scheme or a group size does not fit the model.
    """
    weights = {id(p): p for p in loaded.model.parameters()}
    model = copy.deepcopy(loaded.model, memo=dict(weights))
    notes = quantize_weights(
        model,
        linear=settings.linear,
        group_size=settings.group_size,
        scales=settings.scales,
        lm_head=settings.lm_head or (settings.linear if model.get_output_embeddings() is not None else "none"),
        embedding=settings.embedding,
        embedding_group_size=settings.embedding_group_size,
        calibration=calibration,
    )
    return Quantized(model, notes, loaded.extras)
