"""Build one row through the pipeline's own stages, prove it, and say what became of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from transformers import PreTrainedModel

from pipeline.artifacts import EmittedFacts, Quantized
from pipeline.config import CacheSettings, LowerSettings
from pipeline.emit import emit
from pipeline.export import export
from pipeline.lower import lower
from pipeline.tasks import TASKS
from runners.manifest import PROGRAM_NAME, Delegation, Manifest, ModelIdentity
from runners.package import Package
from tests.zoo.proofs import PROOFS
from tests.zoo.row import Family, Result, Row

LENGTH = 48  # tokens of a cache: 17 of a prompt, 24 more, and some to reach its end
_LONGEST_ERROR = 400


def run(row: Row, folder: Path) -> Result:
    """Take a row as far as it goes. ``folder`` is for its program."""
    family, result = row.family, Result(task=row.family.task)
    settings, extras = family.export, family.extras()
    placement: Literal["buffer", "io"] = "io" if row.placement == "io" else "buffer"
    cache = CacheSettings(max_length=LENGTH, placement=placement, max_encoder_length=family.encoder_length)
    try:
        model, task = family.model(), TASKS[family.task]
        result = replace(result, architecture=type(model).__name__)
        registered = task.register(Quantized(model, {}, extras), cache, settings)
        exported = export(registered, task.plan(registered, settings), {})
        result = replace(result, exports=True)
        facts = emit(lower(exported, LowerSettings(), {}), {}, folder / PROGRAM_NAME).facts
        result = replace(result, lowers=True, **_described(facts))
        PROOFS[family.task].prove(model, Package(folder, manifest(family, model, facts)))
        return replace(result, decodes=True)
    except Exception as error:  # whatever it is, it is what the table says of the row
        return replace(result, error=one_line(error))


def longer(family: Family, folder: Path) -> Result:
    """What becomes of a family of one token a call if it takes as many as any other."""
    settings = family.export.model_copy(update={"max_prefill_length": None})
    return run(Row(replace(family, export=settings), family.placements[0]), folder)


def one_line(error: Exception) -> str:
    """The type and the message of an error, without line ends and addresses."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}…"


def _described(facts: EmittedFacts) -> dict[str, object]:
    methods = {name: method.delegation for name, method in facts.methods.items()}
    return {
        "cache": tuple(sorted({t.kind for t in facts.cache.tensors})) if facts.cache is not None else (),
        "attention": facts.cache.attention if facts.cache is not None else "",
        "tokens_a_call": _tokens_a_call(facts),
        "delegates": {name: found.delegates for name, found in methods.items()},
        "undelegated": {name: _counts(found) for name, found in methods.items()},
    }


def _counts(delegation: Delegation) -> dict[str, int]:
    return {operator.name: operator.count for operator in sorted(delegation.undelegated, key=lambda o: o.name)}


def _tokens_a_call(facts: EmittedFacts) -> int:
    """Of the method that says something of each token; 0 where there is none."""
    for name in ("forward", "decode", "text_decoder"):
        for spec in facts.methods[name].inputs if name in facts.methods else []:
            if spec.name in ("tokens", "embeddings"):
                return spec.shape[1]
    return 0


def manifest(family: Family, model: PreTrainedModel, facts: EmittedFacts) -> Manifest:
    """What the runners need of a manifest."""
    extras = family.extras()
    identity = ModelIdentity(
        source=f"random {family.name}",
        revision=None,
        digest="0" * 64,
        architecture=type(model).__name__,
        task=family.task,
        licence=None,
        parameters=sum(p.numel() for p in model.parameters()),
        random_weights=True,
        vocabulary_size=getattr(model.config.get_text_config(), "vocab_size", None),
    )
    return Manifest(
        schema_version=1,
        name=family.name,
        created_by="tests",
        model=identity,
        config={},
        quantization={},
        methods=facts.methods,
        constant_methods={},
        cache=facts.cache,
        tokenizer=None,
        decoding=extras.decoding,
        audio=extras.audio,
        image=extras.image,
        image_prompt=extras.image_prompt,
        backends=facts.backends,
        operators=facts.operators,
        versions={},
        timings={},
        check=None,
        files={},
    )
