"""Scales of grouped 4-bit weights: as the device stores them, and the search that weighs errors by the layer's inputs.

O output features, I input features, G groups a row, g features a group (I = G · g).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torchao.quantization import IntxUnpackedToInt8Tensor
from transformers import PreTrainedModel

LOW, HIGH = -8, 7  # of a 4-bit weight
CALIBRATION_TOKENS = 1024  # drawn where no text is given
_TO_INTEGER = (
    1.5 * 2**23
)  # added and taken away again, it rounds a small float32 to even, many times faster than round()
_BLOCK = 1 << 15  # weights that are searched at a time: torch shares out no operation this small among threads
_CANDIDATES = torch.linspace(0.60, 1.05, 19).tolist()  # of the scale, as shares of the one that covers the range


def rescaled(
    quantized: IntxUnpackedToInt8Tensor, weight: torch.Tensor, scales: torch.Tensor
) -> IntxUnpackedToInt8Tensor:
    """Return ``weight`` rounded to ``scales`` as the device holds them, otherwise as ``quantized`` is.

    XNNPACK stores the scale of a group as bfloat16. With the scale rounded after the weight, the device would compute
    with other weights than eager PyTorch; here the weight is rounded to the scale that is stored.

    Args:
        quantized: gives block size, dtype and how the input is treated.
        weight: float32 ``[O, I]``.
        scales: float32 ``[O, G]``.
    """
    stored = scales.to(torch.bfloat16).to(torch.float32)
    values = (_grouped(weight, stored) / stored.unsqueeze(-1)).round_().clamp_(LOW, HIGH)
    return IntxUnpackedToInt8Tensor(
        qdata=values.view_as(weight).to(torch.int8),
        scale=stored,
        zero_point=torch.zeros_like(quantized.zero_point),
        target_dtype=quantized.target_dtype,
        block_size=quantized.block_size,
        dtype=quantized.dtype,
        activation_quantization=quantized.activation_quantization,
    )


def searched_scales(weight: torch.Tensor, group_size: int, importance: torch.Tensor) -> torch.Tensor:
    """Return for each group, among shares of the covering scale, the one with the least weighted squared error.

    The error of an output is the sum of weight errors times inputs; with inputs that are roughly uncorrelated, its
    expected square is the sum of squared weight errors times mean squared inputs. (llama.cpp calls the latter imatrix.)

    Args:
        weight: float32 ``[O, I]``.
        group_size: g.
        importance: mean square of each input feature, float32 ``[I]``.

    Returns:
        float32 ``[O, G]``, each a bfloat16 value.
    """
    weights_of = importance.view(1, -1, group_size)
    rows = max(1, _BLOCK // weight.shape[1])  # a block stays in the processor's cache through all candidates
    return torch.cat([_search(part.view(part.shape[0], -1, group_size), weights_of) for part in weight.split(rows)])


def _search(groups: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    """``searched_scales`` for some rows: groups ``[rows, G, g]``, importance ``[1, G, g]``."""
    covering = torch.maximum(groups.amin(-1) / LOW, groups.amax(-1) / HIGH).clamp_min(1e-8)
    best = torch.full_like(covering, torch.inf)
    scales = covering.clone()
    rounded = torch.empty_like(groups)
    for share in _CANDIDATES:
        candidate = (covering * share).to(torch.bfloat16).to(torch.float32)
        step = candidate.unsqueeze(-1)
        torch.div(groups, step, out=rounded)
        rounded.clamp_(LOW, HIGH).add_(_TO_INTEGER).sub_(_TO_INTEGER).mul_(step)
        rounded.sub_(groups).square_().mul_(importance)
        error = rounded.sum(-1)
        better = error < best
        best = torch.where(better, error, best)
        scales = torch.where(better, candidate, scales)
    return scales


def input_importance(
    model: PreTrainedModel, layers: Mapping[str, nn.Module], ids: torch.Tensor, window: int
) -> dict[str, torch.Tensor]:
    """Return the mean square of each layer's input features, float32 ``[I]``, over ``ids`` (int64 ``[n]``).

    The features of a layer that tokens do not reach, as in a vision tower, count all alike.
    """
    sums: dict[str, torch.Tensor] = {}
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    with _watched(layers, sums), torch.inference_mode():
        for start in range(0, len(ids), window):
            model(input_ids=ids[start : start + window].unsqueeze(0), **options)
    unseen = {name: torch.ones(layer.weight.shape[1]) for name, layer in layers.items() if name not in sums}
    return {name: (total / len(ids)).clone() for name, total in sums.items()} | unseen


def random_ids(vocabulary_size: int) -> torch.Tensor:
    """Return the ids that stand for a calibration text where none is given: int64, uniform, always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary_size, (CALIBRATION_TOKENS,), generator=generator)


def _grouped(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return weight.view(*scales.shape, -1)


@contextmanager
def _watched(layers: Mapping[str, nn.Module], sums: dict[str, torch.Tensor]) -> Iterator[None]:
    def watch(name: str, layer: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def add(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            square = inputs[0].flatten(0, -2).float().square().sum(0)
            sums[name] = sums[name] + square if name in sums else square

        return layer.register_forward_pre_hook(add)

    handles = [watch(name, layer) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
