"""A quantized model as plain arithmetic with the same numbers: eager execution unpacks no weight at each step.

torchao executes a quantized linear layer as: quantize and dequantize the input (int8, a scale and zero point a token),
dequantize the weight, multiply in float32. Here the weight is dequantized once, and the input is rounded as torchao
does it, in fewer passes over it.

I input features of a layer.
"""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import nn
from torchao.quantization import IntxUnpackedToInt8Tensor
from transformers import PreTrainedModel

_INT8 = torch.iinfo(torch.int8)
_SMALLEST = torch.finfo(torch.float32).smallest_normal
# Between 2**23 and 2**24 a float32 has no fraction: whatever is below 2**22 in size and is added to this number
# becomes whole, halves going to the even neighbour. ``torch.round`` gives the same and takes many times as long.
_WHOLE = 1.5 * 2**23
# Values at a time: PyTorch gives more to its threads, which for passes as short as these wait longer than they work.
_ONE_THREAD = 1 << 15


def reference_of(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a copy of ``model`` that computes with its dequantized weights.

    Args:
        model: Stays as it is. Of its unquantized weights, those that are of ``dtype`` already are shared.
        dtype: float32: the copy gives the same values as ``model``, and holds its weights dequantized. float64: as
            float32, but all between two roundings of an activation is computed in float64; the roundings themselves are
            those of float32. Each weight is made when a layer reads it and let go at once: all of them together would
            take twice the memory of the model.
    """
    rounding = [name for name, module in model.named_modules() if _quantizes_input(module)]
    is_made_once = dtype == torch.float32
    weights: dict[int, object] = {id(p): _plain(p, dtype) if is_made_once else p for p in model.parameters()}
    reference = copy.deepcopy(model, memo=weights)
    if not is_made_once:
        _make_weights_when_read(reference, dtype)
    for module in reference.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))
    for name in rounding:
        reference.get_submodule(name).register_forward_pre_hook(_quantize_input)
    return reference


def quantizes_activations(model: PreTrainedModel) -> bool:
    """Whether a layer of ``model`` rounds its inputs, so that a last bit can decide a whole step of an int8 value."""
    return any(_quantizes_input(module) for module in model.modules())


def fake_quantize(values: torch.Tensor) -> torch.Tensor:
    """Round each row to int8 with a scale and a zero point of its own, and give back what that stands for.

    Bit for bit torchao's ``_apply_int8_act_asym_per_token_quant_dequant``.

    Args:
        values: float32 [..., I], finite.
    """
    rows = values.reshape(-1, values.shape[-1])
    found = torch.empty_like(rows)
    size = max(1, _ONE_THREAD // rows.shape[-1])
    for part, into in zip(rows.split(size), found.split(size), strict=True):
        _fake_quantize_rows(part, into)
    return found.reshape(values.shape)


def _fake_quantize_rows(rows: torch.Tensor, into: torch.Tensor) -> None:
    low, high = rows.amin(-1, keepdim=True).clamp(max=0), rows.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / (_INT8.max - _INT8.min)).clamp(min=_SMALLEST)
    zero = (_INT8.min - (low / scale).round()).clamp(_INT8.min, _INT8.max)
    torch.mul(rows, 1.0 / scale, out=into)
    into.add_(_WHOLE).sub_(_WHOLE - zero).clamp_(_INT8.min, _INT8.max).sub_(zero).mul_(scale)


def _quantizes_input(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, IntxUnpackedToInt8Tensor) and weight.activation_quantization is not None


def _make_weights_when_read(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Make each parameter an attribute that is computed from the stored one at each reading.

    A model's ``dtype``, which it takes from what is stored, becomes that of the weights which are read.
    """
    for module in model.modules():
        names = [name for name, stored in module._parameters.items() if stored is not None]
        made = {name: property(partial(_made, name=name, dtype=dtype)) for name in names}
        if isinstance(module, PreTrainedModel):
            made["dtype"] = property(lambda _: dtype)
        if made:
            module.__class__ = type(type(module).__name__, (type(module),), made)


def _made(module: nn.Module, name: str, dtype: torch.dtype) -> torch.Tensor:
    return _plain(module._parameters[name], dtype)


def _plain(weight: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    if isinstance(weight, IntxUnpackedToInt8Tensor):
        return nn.Parameter(weight.dequantize().to(dtype), requires_grad=False)
    return weight if weight.dtype == dtype else nn.Parameter(weight.detach().to(dtype), requires_grad=False)


def _quantize_input(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    values, *rest = inputs
    return (fake_quantize(values.float()).to(values.dtype), *rest)
