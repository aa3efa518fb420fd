"""Quantize the weights of a model in place, by torchao, before export."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, IntxWeightOnlyConfig, quantize_
from torchao.quantization.granularity import Granularity, PerAxis, PerGroup
from transformers import PreTrainedModel

from pipeline.quantization.scales import input_importance, random_ids, rescaled, searched_scales
from pipeline.quantization.schemes import EMBEDDING_SCHEMES, LINEAR_SCHEMES, EmbeddingScheme, LinearScheme
from runners.errors import UserError

_DTYPES = {4: torch.int4, 8: torch.int8}
_ALGORITHMS = {"minmax": "affine", "hqq": "hqq_scale_only", "imatrix": "affine"}  # imatrix: its scales are replaced
_WINDOW = 512  # tokens of a calibration text that see each other


@dataclass(frozen=True)
class _Target:
    """One group of weights: a name for messages, the modules by their qualified name, and how to quantize them."""

    key: str  # of the configuration: "quantize.linear"
    modules: dict[str, nn.Module]
    scheme: LinearScheme | EmbeddingScheme
    scheme_name: str
    group_size: int | None


def quantize_weights(
    model: PreTrainedModel,
    *,
    linear: str,
    group_size: int | None,
    scales: str | None,
    lm_head: str,
    embedding: str,
    embedding_group_size: int | None,
    calibration: torch.Tensor | None = None,
) -> dict[str, str]:
    """Quantize the model's weights in place.

    Args:
        model: float32, not quantized yet.
        linear: row of ``LINEAR_SCHEMES`` for every linear layer but the output embedding.
        group_size: input features that share a scale; None: the row's own.
        scales: of grouped 4-bit weights: ``minmax``, ``hqq`` (half-quadratic search) or ``imatrix`` (search that weighs
            errors by the layer's inputs); None: the row's own.
        lm_head: row of ``LINEAR_SCHEMES`` for the output embedding.
        embedding: row of ``EMBEDDING_SCHEMES`` for the input embedding.
        embedding_group_size: features of a row that share a scale; None: the whole row.
        calibration: token ids that ``imatrix`` runs through the model, int64 ``[n]``; None: random ones.

    Returns:
        For the manifest: kind of weights -> what was done, the shared embedding among them.

    Raises:
        UserError: a group size does not divide a weight's input width, or there is nothing of that kind to quantize.
    """
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    done: dict[str, str] = {}
    tied = head is not None and head.weight is table.weight
    if tied and (lm_head, embedding) != ("none", "none"):
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        model.config.tie_word_embeddings = False
    if tied:
        done["tied"] = _tied_note(lm_head, embedding)
    targets = _targets(model, linear, group_size, lm_head, embedding, embedding_group_size)
    for target in targets:
        _check(target)
    importance = _importance(model, targets, scales, calibration)  # of the float model: before anything is quantized
    for target in targets:
        chosen = _scales(target.scheme, scales)
        _quantize(model, target, chosen, importance)
        done[target.key] = _note(target, chosen)
    return done


def _importance(
    model: PreTrainedModel, targets: list[_Target], given: str | None, calibration: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    searched = [t for t in targets if _scales(t.scheme, given) == "imatrix"]
    layers = {name: module for target in searched for name, module in target.modules.items()}
    if not layers:
        return {}
    if model.main_input_name != "input_ids" or model.config.is_encoder_decoder:
        raise UserError(
            f"quantize.scales: imatrix runs tokens through the model, and {type(model).__name__} takes none, or more "
            "than those; set it to minmax or hqq."
        )
    ids = calibration if calibration is not None else random_ids(model.get_input_embeddings().num_embeddings)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or _WINDOW
    return input_importance(model, layers, ids, min(_WINDOW, positions))


def _quantize(model: PreTrainedModel, target: _Target, scales: str, importance: dict[str, torch.Tensor]) -> None:
    originals = {name: module.weight.detach() for name, module in target.modules.items()}
    config = _config(target, _ALGORITHMS[scales])
    quantize_(model, config, lambda _, name: name in originals)
    if not (isinstance(target.scheme, LinearScheme) and target.scheme.grouped and target.group_size):
        return
    for name, module in target.modules.items():
        weight = originals[name]
        found = module.weight.scale
        if scales == "imatrix":
            found = searched_scales(weight, target.group_size, importance[name])
        module.weight = nn.Parameter(rescaled(module.weight, weight, found), requires_grad=False)


def _targets(
    model: PreTrainedModel,
    linear: str,
    group_size: int | None,
    lm_head: str,
    embedding: str,
    embedding_group_size: int | None,
) -> list[_Target]:
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    heads = {n: m for n, m in model.named_modules() if m is head and head is not None}
    tables = {n: m for n, m in model.named_modules() if m is table}
    targets = []
    if row := LINEAR_SCHEMES[linear]:
        targets.append(_Target("quantize.linear", linears, row, linear, _group(row, group_size)))
    if row := LINEAR_SCHEMES[lm_head]:
        targets.append(_Target("quantize.lm_head", heads, row, lm_head, _group(row, group_size)))
    if table_row := EMBEDDING_SCHEMES[embedding]:
        targets.append(_Target("quantize.embedding", tables, table_row, embedding, embedding_group_size))
    return targets


def _group(row: LinearScheme, given: int | None) -> int | None:
    return (given or row.group_size) if row.grouped else None


def _scales(scheme: LinearScheme | EmbeddingScheme, given: str | None) -> str:
    """``scales`` is about grouped 4-bit linear weights; everything else takes the range of its values."""
    if not isinstance(scheme, LinearScheme):
        return "minmax"
    return (given or scheme.scales) if scheme.grouped and scheme.weight_bits == 4 else scheme.scales


def _bits(scheme: LinearScheme | EmbeddingScheme) -> int:
    return scheme.weight_bits if isinstance(scheme, LinearScheme) else scheme.bits


def _check(target: _Target) -> None:
    if not target.modules:
        raise UserError(f"{target.key}: the model has no such layer to quantize; set it to none.")
    if target.group_size is None:
        return
    for name, module in target.modules.items():
        width = module.weight.shape[1]
        if width % target.group_size:
            suiting = ", ".join(str(g) for g in (16, 32, 64, 128, 256) if width % g == 0) or "none"
            raise UserError(
                f"{target.key}: the group size {target.group_size} does not divide the {width} input features of "
                f"{name}.weight. Divisors that suit: {suiting}."
            )


def _config(target: _Target, algorithm: str) -> Int8DynamicActivationIntxWeightConfig | IntxWeightOnlyConfig:
    dtype = _DTYPES[_bits(target.scheme)]
    granularity: Granularity = PerGroup(target.group_size) if target.group_size else PerAxis(0)
    if isinstance(target.scheme, LinearScheme) and target.scheme.activation == "int8_dynamic":
        return Int8DynamicActivationIntxWeightConfig(
            weight_dtype=dtype, weight_granularity=granularity, intx_choose_qparams_algorithm=algorithm
        )
    return IntxWeightOnlyConfig(weight_dtype=dtype, granularity=granularity, intx_choose_qparams_algorithm=algorithm)


def _note(target: _Target, scales: str) -> str:
    group = f"group {target.group_size}" if target.group_size else "one scale a row"
    return f"{target.scheme_name}, {group}, {scales} scales, {len(target.modules)} weights"


def _tied_note(lm_head: str, embedding: str) -> str:
    if (lm_head, embedding) == ("none", "none"):
        return (
            "lm_head and the input embedding are one tensor; XNNPACK packs its own copy for lm_head, so the file holds "
            "it twice"
        )
    return (
        "lm_head and the input embedding are one tensor in the source; here they are two: "
        f"lm_head {lm_head}, embedding {embedding}, each quantized from the same float32 values"
    )
