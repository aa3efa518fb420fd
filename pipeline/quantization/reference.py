"""A quantized model as plain float32 arithmetic with the same numbers: eager execution unpacks no weight at each step.

torchao executes a quantized linear layer as: quantize and dequantize the input (int8, a scale and zero point a token),
dequantize the weight, multiply in float32. Here the weight is dequantized once, and the input is treated by torchao's
own function.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torchao.quantization import IntxUnpackedToInt8Tensor
from torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor import (
    _apply_int8_act_asym_per_token_quant_dequant as fake_quantize,
)
from transformers import PreTrainedModel


def reference_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of ``model`` that computes the same values from float32 weights; unquantized weights are shared."""
    shared = {id(p): p for p in model.parameters()}
    reference = copy.deepcopy(model, memo=dict(shared))
    for module in reference.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, IntxUnpackedToInt8Tensor):
            continue
        module.weight = nn.Parameter(weight.dequantize(), requires_grad=False)
        if weight.activation_quantization is not None:
            module.register_forward_pre_hook(_quantize_input)
    return reference


def _quantize_input(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (fake_quantize(inputs[0]), *inputs[1:])
