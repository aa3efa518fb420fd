"""Goldens: what eager PyTorch computed on the build host, recorded so that any machine can replay it.

P prompts, N steps of a prompt, V vocabulary, T the ``TOP`` largest logits of a step (V where the vocabulary is
smaller). Everything is teacher-forced on the eager model's own greedy tokens, so that one pass over them shows at which
steps a program would have chosen differently. The steps of most prompts end with the first end-of-sequence token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from runners.cases import INPUTS, ROWS, CaseHeader, GoldenCase, header_of, tensors_of
from runners.errors import UserError

TOP = 64
ENCODER = "encoder"
FORMAT = "pteline-goldens-2"


@dataclass(frozen=True)
class Reference:
    """What one eager model (quantized as the package is, or not quantized) said along the golden tokens of a prompt."""

    tokens: torch.Tensor  # int64 [N]: this model's greedy choice at each step
    top_ids: torch.Tensor  # int64 [N, T]
    top_logits: torch.Tensor  # float32 [N, T], largest first
    log_sum_exp: torch.Tensor  # float32 [N], over the whole vocabulary


class Figures(BaseModel):
    """Base of figures in the file's metadata: infinities and NaN survive JSON as strings."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class RoundingFigures(Figures):
    """How far eager float64 execution of the package's weights lies from eager float32 execution, along one prompt."""

    equal_steps: int
    max_margin: float  # logits; 0 where every step is equal
    max_logit_difference: float
    mean_logit_difference: float
    mean_kl: float  # nats


class Rounding(Figures):
    """What rounding alone does to a model whose activations are quantized: no program can be much closer than this.

    A last bit decides which way an activation is rounded to int8, and that decides others in the layers behind it.
    """

    recorded: RoundingFigures  # over the recorded logits, as a program is measured away from the build host
    whole: RoundingFigures  # over the whole vocabulary


@dataclass(frozen=True)
class GoldenPrompt:
    """One prompt: its ids, the tokens that are forced, and both references at each step.

    Step 0 is the prompt's own last position; step i > 0 is taken after ``forced[i - 1]`` was fed. The last forced token
    is never fed, so a prompt of n tokens occupies n + N - 1 cache positions.
    """

    name: str  # "0", "1", … or "long"
    text: str
    prompt_ids: torch.Tensor  # int64 [n]
    forced: torch.Tensor  # int64 [N]: the greedy tokens of the model with the package's weights
    quantized: Reference  # eager execution of the package's weights
    unquantized: Reference  # eager execution of the source's weights, teacher-forced on ``forced``
    rounding: Rounding | None = None  # None: the model quantizes no activation
    encoder: Mapping[str, torch.Tensor] = field(default_factory=dict)  # inputs of ``encode``, where the program has one


@dataclass(frozen=True)
class GoldenText:
    """A text for perplexity: ids, the window it is cut into, and the eager models' mean negative log-likelihood.

    Each window starts from an empty cache, and its first token is not scored (:func:`runners.metrics.windows`).
    """

    ids: torch.Tensor  # int64 [n]
    window: int
    quantized_nll: float  # nats a token
    unquantized_nll: float


@dataclass(frozen=True)
class Goldens:
    """All goldens of a package."""

    prompts: tuple[GoldenPrompt, ...]
    text: GoldenText | None
    cases: tuple[GoldenCase, ...] = ()  # of a program without a cache, which has neither prompts nor a text


@dataclass(frozen=True)
class _PromptHeader:
    name: str
    text: str
    rounding: Rounding | None
    encoder: tuple[str, ...] = ()  # names of the inputs of ``encode``


@dataclass(frozen=True)
class _TextHeader:
    window: int
    quantized_nll: float
    unquantized_nll: float


@dataclass(frozen=True)
class _Header:
    """What the file's metadata holds beside the tensors."""

    format: str
    prompts: tuple[_PromptHeader, ...]
    text: _TextHeader | None
    cases: tuple[CaseHeader, ...] = ()


def summarise(logits: torch.Tensor) -> Reference:
    """Reduce the logits of all steps, float [N, V], to what is recorded."""
    logits = logits.float()
    top = logits.topk(min(TOP, logits.shape[-1]), dim=-1)
    return Reference(logits.argmax(-1), top.indices, top.values, logits.logsumexp(-1))


def save(goldens: Goldens, path: Path) -> None:
    """Write goldens as one safetensors file; names are ``<prompt>/<field>``, texts go to the file's metadata.

    Raises:
        ValueError: two prompts have the same name, or a name contains a slash.
    """
    for names in ([prompt.name for prompt in goldens.prompts], [case.name for case in goldens.cases]):
        if len(set(names)) != len(names) or any("/" in name for name in names):
            raise ValueError(f"golden prompts and cases need distinct names without a slash, got {names}")
    tensors = {f"{p.name}/{part}": value for p in goldens.prompts for part, value in _prompt_tensors(p).items()}
    if goldens.text is not None:
        tensors["text/ids"] = goldens.text.ids
    tensors |= {name: tensor for case in goldens.cases for name, tensor in tensors_of(case)}
    header = TypeAdapter(_Header).dump_json(_header(goldens)).decode()
    # Cloned: the format refuses tensors that share memory, as ``forced`` and the quantized model's tokens do.
    packed = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    temporary = path.with_name(f".{path.name}.partial")
    try:
        save_file(packed, temporary, metadata={"goldens": header})
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: Path) -> Goldens:
    """Read what :func:`save` wrote.

    Raises:
        UserError: the file is missing, truncated, of another format, or lacks a tensor.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: goldens cannot be read ({error}); build the package again") from error
    header = _read_header(path, metadata)
    prompts = tuple(_read_prompt(path, tensors, prompt) for prompt in header.prompts)
    cases = tuple(_read_case(path, tensors, case) for case in header.cases)
    return Goldens(prompts, _read_text(path, tensors, header.text), cases)


def _header(goldens: Goldens) -> _Header:
    prompts = tuple(
        _PromptHeader(prompt.name, prompt.text, prompt.rounding, tuple(prompt.encoder)) for prompt in goldens.prompts
    )
    text = goldens.text
    figures = _TextHeader(text.window, text.quantized_nll, text.unquantized_nll) if text is not None else None
    return _Header(FORMAT, prompts, figures, tuple(map(header_of, goldens.cases)))


def _prompt_tensors(prompt: GoldenPrompt) -> dict[str, torch.Tensor]:
    tensors = {"prompt_ids": prompt.prompt_ids, "forced": prompt.forced}
    tensors |= {f"{ENCODER}/{name}": tensor for name, tensor in prompt.encoder.items()}
    for name, reference in (("quantized", prompt.quantized), ("unquantized", prompt.unquantized)):
        tensors |= {f"{name}/{part.name}": getattr(reference, part.name) for part in fields(reference)}
    return tensors


def _read_header(path: Path, metadata: Mapping[str, str]) -> _Header:
    try:
        header = TypeAdapter(_Header).validate_json(metadata["goldens"])
    except KeyError as error:
        raise UserError(f"{path}: not a file of goldens: its metadata has no entry 'goldens'") from error
    except (ValidationError, json.JSONDecodeError) as error:
        raise UserError(f"{path}: the metadata of these goldens is damaged ({error})") from error
    if header.format != FORMAT:
        raise UserError(f"{path}: goldens of format '{header.format}', expected '{FORMAT}'; build the package again")
    return header


def _read_prompt(path: Path, tensors: Mapping[str, torch.Tensor], header: _PromptHeader) -> GoldenPrompt:
    forced = _tensor(path, tensors, f"{header.name}/forced", torch.int64, (None,))
    return GoldenPrompt(
        name=header.name,
        text=header.text,
        prompt_ids=_tensor(path, tensors, f"{header.name}/prompt_ids", torch.int64, (None,)),
        forced=forced,
        quantized=_read_reference(path, tensors, f"{header.name}/quantized", forced.shape[0]),
        unquantized=_read_reference(path, tensors, f"{header.name}/unquantized", forced.shape[0]),
        rounding=header.rounding,
        encoder={name: _any_tensor(path, tensors, f"{header.name}/{ENCODER}/{name}") for name in header.encoder},
    )


def _read_case(path: Path, tensors: Mapping[str, torch.Tensor], header: CaseHeader) -> GoldenCase:
    prefix = f"case/{header.name}"
    quantized = _tensor(path, tensors, f"{prefix}/quantized", torch.float32, (None, None))
    shape = tuple(quantized.shape)
    return GoldenCase(
        name=header.name,
        text=header.text,
        method=header.method,
        output=header.output,
        kind=header.kind,
        inputs={name: _any_tensor(path, tensors, f"{prefix}/{INPUTS}/{name}") for name in header.inputs},
        rows=_tensor(path, tensors, f"{prefix}/{ROWS}", torch.int64, shape[:1]),
        quantized=quantized,
        unquantized=_tensor(path, tensors, f"{prefix}/unquantized", torch.float32, shape),
    )


def _read_reference(path: Path, tensors: Mapping[str, torch.Tensor], prefix: str, steps: int) -> Reference:
    top_ids = _tensor(path, tensors, f"{prefix}/top_ids", torch.int64, (steps, None))
    return Reference(
        tokens=_tensor(path, tensors, f"{prefix}/tokens", torch.int64, (steps,)),
        top_ids=top_ids,
        top_logits=_tensor(path, tensors, f"{prefix}/top_logits", torch.float32, tuple(top_ids.shape)),
        log_sum_exp=_tensor(path, tensors, f"{prefix}/log_sum_exp", torch.float32, (steps,)),
    )


def _read_text(path: Path, tensors: Mapping[str, torch.Tensor], header: _TextHeader | None) -> GoldenText | None:
    if header is None:
        return None
    ids = _tensor(path, tensors, "text/ids", torch.int64, (None,))
    if ids.shape[0] < 2 or header.window < 2:
        raise UserError(
            f"{path}: a text of {ids.shape[0]} tokens in windows of {header.window}; both must be at least 2"
        )
    return GoldenText(ids, header.window, header.quantized_nll, header.unquantized_nll)


def _tensor(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    name: str,
    dtype: torch.dtype,
    shape: tuple[int | None, ...],
) -> torch.Tensor:
    """The named tensor, which must have this dtype and, where a size is given, this shape."""
    tensor = _any_tensor(path, tensors, name)
    fits = len(tensor.shape) == len(shape) and all(
        want is None or want == got for want, got in zip(shape, tensor.shape, strict=True)
    )
    if tensor.dtype != dtype or not fits:
        wanted = [size if size is not None else "any" for size in shape]
        raise UserError(
            f"{path}: tensor '{name}' is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {wanted}; "
            "build the package again"
        )
    return tensor


def _any_tensor(path: Path, tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    tensor = tensors.get(name)
    if tensor is None:
        raise UserError(f"{path}: goldens lack the tensor '{name}'; build the package again")
    return tensor
