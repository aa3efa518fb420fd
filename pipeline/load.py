"""Stage ``load``: a source becomes a float32 model in evaluation mode, its identity and its tokenizer."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from transformers import AutoConfig, GgufConfig, PreTrainedConfig, PreTrainedModel

from pipeline.artifacts import Loaded
from pipeline.config import ModelSettings
from pipeline.quiet import quiet_transformers
from pipeline.sources import Fetched, fetch
from pipeline.sources.parsed_once import parsed_once
from pipeline.tasks import TASKS
from pipeline.tasks.infer import infer_task
from pipeline.tokenizer import load_tokenizer
from pipeline.unexpected import first_line
from runners.errors import UserError
from runners.manifest import ModelIdentity, TaskName

# Lists in a model's config with one entry a layer.
LISTS_A_LAYER = (
    "layer_types",
    "layers_block_type",
    "mlp_layer_types",
    "indexer_types",
    "no_rope_layers",
    "layer_rope_theta",
    "num_attention_heads_per_layer",
    "num_key_value_heads_per_layer",
)
SHOWN = 5  # names in a message


@dataclass(frozen=True)
class _Findings:
    """What transformers found when it matched a checkpoint with a model."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]


def load(settings: ModelSettings) -> Loaded:
    """Fetch and load what ``settings`` describe.

    The model is float32, in evaluation mode, requires no gradients and holds no trace of a quantized file.

    Raises:
        UserError: the source cannot be fetched or is refused; its architecture is not supported; it has fewer layers
            than asked for; or the checkpoint lacks a weight of the model.
    """
    with parsed_once():
        return _load(settings)


def _load(settings: ModelSettings) -> Loaded:
    fetched = fetch(
        settings.source,
        revision=settings.revision,
        sha256=settings.sha256,
        allow_pickle=settings.allow_pickle,
        trust_remote_code=settings.trust_remote_code,
    )
    config = _config(fetched, settings.trust_remote_code)
    _check_quantized(config, fetched)
    task = infer_task(config, settings.task)
    if settings.num_layers is not None:
        keep_layers(config, settings.num_layers)
    if settings.random_weights_seed is not None:
        model = _random(config, settings.random_weights_seed, settings.trust_remote_code, task)
    else:
        model = _trained(fetched, config, settings, task)
    model.eval().requires_grad_(False)
    tokenizer = load_tokenizer(fetched, config, trust_remote_code=settings.trust_remote_code)
    extras = TASKS[task].extras(fetched.path if fetched.kind == "folder" else None, model.config)
    return Loaded(model, _identity(model, fetched, settings, task), tokenizer, extras)


def keep_layers(config: PreTrainedConfig, count: int) -> None:
    """Shorten ``config`` in place to its first ``count`` layers.

    Raises:
        UserError: the model has fewer.
    """
    text = config.get_text_config()
    total = text.num_hidden_layers
    if count > total:
        raise UserError(f"model.num_layers: {count}, but the model has {total} layers; give at most that")
    for name in LISTS_A_LAYER:
        entries = getattr(text, name, None)
        if isinstance(entries, list | tuple) and len(entries) == total:
            setattr(text, name, list(entries[:count]))
    text.num_hidden_layers = count


def _config(fetched: Fetched, trust_remote_code: bool) -> PreTrainedConfig:
    try:
        with quiet_transformers():
            if fetched.kind == "gguf":
                return AutoConfig.from_pretrained(
                    fetched.path.parent, gguf_file=fetched.path.name, local_files_only=True
                )
            return AutoConfig.from_pretrained(fetched.path, trust_remote_code=trust_remote_code, local_files_only=True)
    # a config is the user's data, and each config class refuses bad values in a way of its own
    except Exception as error:
        raise UserError(f"{fetched.path}: the model's config cannot be read: {first_line(error)}") from error


def _check_quantized(config: PreTrainedConfig, fetched: Fetched) -> None:
    quantized = getattr(config, "quantization_config", None)
    if quantized is not None and fetched.kind == "folder":
        method = quantized.get("quant_method", "unknown") if isinstance(quantized, dict) else quantized
        raise UserError(
            f"{fetched.path}: the weights are quantized already (quant_method {method}); expected float weights, or a "
            "GGUF file, which is unpacked to float32; give the unquantized model as model.source"
        )


def _random(config: PreTrainedConfig, seed: int, trust_remote_code: bool, task: TaskName) -> PreTrainedModel:
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TASKS[task].auto_model.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)


def _trained(fetched: Fetched, config: PreTrainedConfig, settings: ModelSettings, task: TaskName) -> PreTrainedModel:
    model, findings = _from_pretrained(fetched, config, settings, task)
    unread = TASKS[task].unread
    findings = replace(findings, missing=tuple(name for name in findings.missing if not name.startswith(unread)))
    _check_weights(findings, fetched, type(model).__name__, settings.num_layers)
    return model


def _from_pretrained(
    fetched: Fetched, config: PreTrainedConfig, settings: ModelSettings, task: TaskName
) -> tuple[PreTrainedModel, _Findings]:
    is_gguf = fetched.kind == "gguf"
    # dequantize: else the model counts as quantized, and weights stay packed where a kernel for them is installed
    options = {"gguf_file": fetched.path.name, "quantization_config": GgufConfig(dequantize=True)} if is_gguf else {}
    if not is_gguf:
        options["use_safetensors"] = None if settings.allow_pickle else True
    try:
        with quiet_transformers():
            model, info = TASKS[task].auto_model.from_pretrained(
                fetched.path.parent if is_gguf else fetched.path,
                config=config,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below, with names
                trust_remote_code=settings.trust_remote_code,
                local_files_only=True,
                **options,
            )
    # damaged files and unknown layouts fail anywhere below this call
    except Exception as error:
        raise UserError(f"{fetched.path}: the weights cannot be loaded: {first_line(error)}") from error
    mismatched = tuple(
        f"{name} (file {list(has)}, model {list(wants)})" for name, has, wants in info["mismatched_keys"]
    )
    return model, _Findings(tuple(info["missing_keys"]), tuple(info["unexpected_keys"]), mismatched)


def _check_weights(findings: _Findings, fetched: Fetched, architecture: str, num_layers: int | None) -> None:
    """transformers fills a weight that is missing with random numbers; here it is an error."""
    if findings.missing:
        raise UserError(
            f"{fetched.path}: the checkpoint lacks {len(findings.missing)} weights of {architecture}: "
            f"{_some(findings.missing)}; the file is incomplete, or config.json is of another model"
        )
    if findings.mismatched:
        raise UserError(
            f"{fetched.path}: {len(findings.mismatched)} weights do not have the shape that the config asks for: "
            f"{_some(findings.mismatched)}; config.json and weights are of different models"
        )
    unused = [name for name in findings.unexpected if not _beyond(name, num_layers)]
    if unused:
        message = f"{fetched.path}: {len(unused)} tensors are not used by {architecture}: {_some(unused)}"
        warnings.warn(message, stacklevel=2)


def _beyond(name: str, num_layers: int | None) -> bool:
    """Whether a tensor belongs to a layer that ``num_layers`` cut off."""
    found = re.search(r"\.(?:layers|h|blocks|blk)\.(\d+)\.", f".{name}")
    return num_layers is not None and found is not None and int(found[1]) >= num_layers


def _identity(model: PreTrainedModel, fetched: Fetched, settings: ModelSettings, task: TaskName) -> ModelIdentity:
    return ModelIdentity(
        source=settings.source,
        revision=fetched.revision,
        digest=fetched.digest,
        architecture=type(model).__name__,
        task=task,
        licence=settings.licence or fetched.licence,
        parameters=sum(weight.numel() for weight in model.parameters()),
        random_weights=settings.random_weights_seed is not None,
        vocabulary_size=getattr(model.config.get_text_config(), "vocab_size", None),
    )


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
    return ", ".join(ordered[:SHOWN]) + more
