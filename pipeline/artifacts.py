"""What the stages hand to each other: frozen, each named by what has been done to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from executorch.exir import EdgeProgramManager
from torch.export import ExportedProgram
from transformers import PreTrainedModel
from transformers.cache_utils import Cache as ModelCache
from transformers.utils import ModelOutput

from pipeline.attention import Attention
from pipeline.caches import CachePytree
from runners.manifest import Cache, Decoding, ImagePrompt, Manifest, Method, ModelIdentity, TensorSpec, Tokenizer
from runners.preprocessing import AudioPreprocessing, ImagePreprocessing, Pooling
from runners.strict import Strict


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer as the package keeps it: texts, without the library that made them."""

    tokenizer_json: str  # of the ``tokenizers`` library; neither truncates nor pads
    chat_template: str | None  # jinja2
    info: Tokenizer


@dataclass(frozen=True)
class Extras:
    """What a runner needs beside program and tokenizer; None: the model's task has no use for it."""

    decoding: Decoding | None = None
    audio: AudioPreprocessing | None = None
    image: ImagePreprocessing | None = None
    image_prompt: ImagePrompt | None = None
    pooling: Pooling | None = None
    labels: list[str] | None = None  # of each logit


@dataclass(frozen=True)
class Loaded:
    """A model ready to be quantized, and where it came from."""

    model: PreTrainedModel  # float32, in evaluation mode, without gradients
    identity: ModelIdentity
    tokenizer: LoadedTokenizer | None  # None: the source has none
    extras: Extras = Extras()


@dataclass(frozen=True)
class Quantized:
    """The model that the package will hold. Weights that a scheme left alone are shared with ``Loaded.model``."""

    model: PreTrainedModel
    notes: dict[str, str]  # for the manifest: kind of weights -> what was done to it
    extras: Extras = Extras()  # as ``Loaded.extras``


@dataclass(frozen=True)
class EncoderInput:
    """What the encoder of an encoder-decoder model takes and gives."""

    argument: str  # of the model's forward
    name: str  # in the program
    longest: torch.Tensor  # one of the largest size
    shortest: int | None  # least size of its last axis; None: it has always the size of ``longest``
    output: ModelOutput  # of the class that the encoder gives, float32 zeros for ``longest``


@dataclass(frozen=True)
class Registered:
    """A model and an empty cache of the device's own kind, whose class is a known pytree; None for a model without."""

    model: PreTrainedModel
    attention: Attention
    cache: ModelCache | None
    entry: CachePytree | None
    layout: Cache | None  # where the cache will live, and each of its tensors
    extras: Extras = Extras()  # as ``Loaded.extras``
    encoder: EncoderInput | None = None  # None: the model has no encoder beside its decoder


class Signature(Strict):
    """Inputs and outputs of one method, with the bounds of each dynamic dimension."""

    inputs: list[TensorSpec]
    outputs: list[TensorSpec]


class ProgramFacts(Strict):
    """What the manifest says of a program that no later stage can find out from the program itself."""

    signatures: dict[str, Signature]  # method -> inputs and outputs
    cache: Cache | None
    quantization: dict[str, str]


@dataclass(frozen=True)
class Exported:
    """Functional programs by method name, their cache placed. None of them knows a cache class any more."""

    programs: dict[str, ExportedProgram]
    facts: ProgramFacts


@dataclass(frozen=True)
class Lowered:
    """Programs in the edge dialect, with the backend's parts as delegates."""

    programs: EdgeProgramManager
    delegated_operators: dict[str, int]  # method -> operators inside its delegates
    facts: ProgramFacts


class EmittedFacts(Strict):
    """What the manifest says of a ``.pte`` file."""

    methods: dict[str, Method]
    constant_methods: dict[str, int | bool | list[int]]
    backends: list[str]
    operators: list[str]
    cache: Cache | None
    quantization: dict[str, str]


@dataclass(frozen=True)
class Emitted:
    """A ``.pte`` file and what the manifest says of it."""

    program: Path
    facts: EmittedFacts


@dataclass(frozen=True)
class Package:
    """A finished package directory."""

    path: Path
    manifest: Manifest
