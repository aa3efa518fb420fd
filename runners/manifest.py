"""``manifest.json``: the one description that the two halves share.

The pipeline writes it as the last file of a package, the runners verify it before they load anything. Its ``digest``
covers its own content, so that an edit is noticed; it is a checksum, not a signature.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Literal

from pydantic import JsonValue, ValidationError

from runners.errors import UserError
from runners.preprocessing import AudioPreprocessing, ImagePreprocessing, Pooling
from runners.strict import Strict

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
PROGRAM_NAME = "model.pte"
GOLDENS_NAME = "goldens.safetensors"
TOKENIZER_NAME = "tokenizer.json"
CHAT_TEMPLATE_NAME = "chat_template.jinja"
REPORT_DIRECTORY = "report"


class TensorSpec(Strict):
    """One input or output of a method. A dynamic dimension is given by its bounds, both included."""

    name: str
    dtype: str  # "float32", "int64", …
    shape: list[int]  # the largest size of each dimension
    min_shape: list[int]  # the smallest; equal to ``shape`` where the dimension is static


class OperatorCount(Strict):
    """How often an operator occurs in a program outside every delegate."""

    name: str  # "aten::embedding.out"
    count: int


class Delegation(Strict):
    """What the backend took of one method, and what it left to portable kernels."""

    delegates: int
    delegated_operators: int
    undelegated: list[OperatorCount]


class Method(Strict):
    """One method of the program: its signature, planned memory and delegation."""

    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    planned_bytes: int  # activations and mutable buffers, as the memory planner laid them out
    delegation: Delegation


CacheKind = Literal["full", "sliding", "conv", "recurrent", "position", "cross"]


class CacheTensor(Strict):
    """One cache tensor: a leaf of the cache's pytree."""

    path: str  # "cache.layers.3.keys"
    kind: CacheKind
    shape: list[int]
    dtype: str
    bytes: int


class Cache(Strict):
    """Where the cache lives, how long it is, and each of its tensors."""

    placement: Literal["buffer", "io"]
    attention: Literal["custom", "portable"]
    max_length: int
    bytes: int
    tensors: list[CacheTensor]


TaskName = Literal[
    "text-generation",
    "fill-mask",
    "embedding",
    "image-classification",
    "speech-to-text",
    "text2text",
    "image-text-to-text",
]


class ModelIdentity(Strict):
    """Where the weights came from. ``digest`` is the sha256 of the source file, or of the sorted files of a folder."""

    source: str
    revision: str | None
    digest: str
    architecture: str  # "LlamaForCausalLM"
    task: TaskName
    licence: str | None
    parameters: int
    random_weights: bool
    vocabulary_size: int | None  # None: the model has no tokens


class Tokenizer(Strict):
    """Token ids that matter to a runner, and the files that hold the tokenizer and the chat template."""

    file: str
    chat_template: str | None
    bos_id: int | None
    eos_ids: list[int]
    adds_bos: bool
    special_tokens: dict[str, str]  # for the chat template: "bos_token" -> "<s>"


class Decoding(Strict):
    """How an answer of an encoder-decoder model begins, and what it never holds. Token ids."""

    prompt: list[int]  # given to the decoder first: the start token, and what the model is made to begin with
    suppressed: list[int]  # never written
    suppressed_first: list[int]  # not written as an answer's first token


class ImagePrompt(Strict):
    """What one image becomes in a prompt: token ids. Between the two lists ``token_id`` stands once a feature."""

    token_id: int
    before: list[int]
    after: list[int]


class StageFigure(Strict):
    """What one stage of the build cost."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int  # peak resident memory of the process during the stage
    cached: bool  # taken from the stage cache: the figures are of fetching it


class FileEntry(Strict):
    """One file of the package."""

    sha256: str
    size: int


class CheckSummary(Strict):
    """The verdict of the check that the build ran; the details are in ``report/check.json``."""

    passed: bool
    report: str


class Manifest(Strict):
    """Everything a runner or an app team needs to know about a package."""

    schema_version: Literal[1]
    name: str
    created_by: str  # "pteline 0.1.0"
    model: ModelIdentity
    config: dict[str, JsonValue]  # the configuration as built: inheritance and overrides applied
    quantization: dict[str, str]  # weight name or class of weights -> what was done to it
    methods: dict[str, Method]
    constant_methods: dict[str, int | bool | list[int]]
    cache: Cache | None
    tokenizer: Tokenizer | None
    decoding: Decoding | None = None  # None: the model has no encoder and decoder
    audio: AudioPreprocessing | None = None  # None: the model takes no recording
    image: ImagePreprocessing | None = None  # None: the model takes no image
    image_prompt: ImagePrompt | None = None  # None: its prompts hold no images
    pooling: Pooling | None = None  # None: its outputs are no hidden states to make one vector of
    labels: list[str] | None = None  # of each logit of a classifier
    backends: list[str]  # "XnnpackBackend"
    operators: list[str]  # kernels that the runtime must have, "llama::custom_sdpa.out"
    versions: dict[str, str]
    timings: dict[str, StageFigure]
    check: CheckSummary | None  # None: built with --no-check, or with nothing to check
    files: dict[str, FileEntry]  # path relative to the package -> digest; every file but the manifest itself
    digest: str = ""  # sha256 of this manifest's canonical JSON with this field empty; set by ``sealed``


def sealed(manifest: Manifest) -> Manifest:
    """The same manifest with its ``digest`` computed: the last thing to do before it is written."""
    return manifest.model_copy(update={"digest": _digest(manifest.model_dump(mode="json"))})


def to_json(manifest: Manifest) -> str:
    """The text of ``manifest.json``."""
    return json.dumps(manifest.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"


def read_manifest(path: Path) -> Manifest:
    """Read and verify a ``manifest.json``.

    Raises:
        UserError: the file is missing or no JSON object, has another schema version, or was edited after the build.
    """
    data = _read_object(path)
    _require_version(path, data.get("schema_version"))
    if data.get("digest") != _digest(data):
        raise UserError(
            f"{path}: manifest.json was edited after the build, or damaged: its digest does not match its content. "
            "Change the configuration and build the package again, or fetch the package again."
        )
    try:
        return Manifest.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}: '{place}': {first['msg']}. Build the package again with this version.") from error


def _read_object(path: Path) -> dict[str, JsonValue]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not readable as JSON ({error}). Fetch or build the package again.") from error
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(data).__name__}. Build the package again.")
    return data


def _require_version(path: Path, version: JsonValue) -> None:
    if type(version) is int and version == SCHEMA_VERSION:
        return
    if type(version) is int and version > SCHEMA_VERSION:
        advice = "It was written by a newer pteline: upgrade pteline to open it."
    else:
        advice = "Build the package again with this version of pteline."
    raise UserError(f"{path}: schema_version is {version!r}, this pteline reads {SCHEMA_VERSION}. {advice}")


def _digest(data: dict[str, JsonValue]) -> str:
    unsealed = {**data, "digest": ""}
    canonical = json.dumps(unsealed, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()
