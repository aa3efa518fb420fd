"""Combinations of settings that cannot work whatever the model is: refused when the configuration is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pipeline.config import (
    BuildSettings,
    CacheSettings,
    CheckSettings,
    ExportSettings,
    ModelSettings,
    QuantizeSettings,
)
from pipeline.config_yaml import Keys
from pipeline.quantization.schemes import LINEAR_SCHEMES, LinearScheme
from pipeline.sources.kinds import Kind, holds_gguf, kind
from runners.errors import UserError


@dataclass(frozen=True)
class Problem:
    """What is wrong with the setting at ``keys``, and what to do."""

    keys: Keys
    text: str


def problems(settings: BuildSettings) -> Iterator[Problem]:
    """Every impossible combination in ``settings``."""
    yield from _model(settings.model)
    yield from _quantize(settings.quantize)
    yield from _taken(settings)
    yield from _export(settings)
    yield from _check(settings.check)
    yield from _top_k(settings)
    yield from _rounding(settings)
    yield from _lengths(settings.check, settings.cache.max_length)


def _model(model: ModelSettings) -> Iterator[Problem]:
    try:
        source = kind(model.source)
    except UserError as error:
        yield Problem(("model", "source"), str(error))
        return
    yield from _pins(model, source)
    if holds_gguf(model.source):
        for name in ("trust_remote_code", "allow_pickle"):
            if getattr(model, name):
                text = "a GGUF file holds neither code nor pickles, so this has no effect; remove it"
                yield Problem(("model", name), text)


def _pins(model: ModelSettings, source: Kind) -> Iterator[Problem]:
    sha256, revision = ("model", "sha256"), ("model", "revision")
    if source == "pypi" and model.sha256 is None:
        yield Problem(
            ("model", "source"),
            "a pypi: source needs model.sha256, the sha256 of the file in the wheel (of a folder/: its digest)",
        )
    if source == "hub" and model.sha256 is not None:
        yield Problem(sha256, "a hub id is many files and has no one sha256; pin it with model.revision: <full commit>")
    if source == "folder" and model.sha256 is not None:
        text = "a folder is many files and has no one sha256; remove it (the manifest records a digest of the folder)"
        yield Problem(sha256, text)
    if source != "hub" and model.revision is not None:
        pin = {"pypi": "the version and sha256 pin it", "gguf": "pin it with model.sha256", "folder": "remove it"}[
            source
        ]
        yield Problem(revision, f"only a hub id has revisions, and {model.source!r} is none; {pin}")


def _quantize(quantize: QuantizeSettings) -> Iterator[Problem]:
    names = {quantize.linear, quantize.lm_head or quantize.linear}
    schemes = [scheme for name in names if (scheme := LINEAR_SCHEMES[name]) is not None]
    given = f"linear is {quantize.linear} and lm_head {quantize.lm_head or quantize.linear}"
    if quantize.group_size is not None and not any(scheme.grouped for scheme in schemes):
        text = f"{given}, and neither has groups; remove it (null), or choose {_names(_grouped)}"
        yield Problem(("quantize", "group_size"), text)
    if quantize.scales is not None and not any(map(_grouped_4_bit, schemes)):
        text = f"is about grouped 4-bit weights, but {given}; remove it (null), or choose {_names(_grouped_4_bit)}"
        yield Problem(("quantize", "scales"), text)
    finding = quantize.scales or next((s.scales for s in schemes if _grouped_4_bit(s)), None)
    if quantize.calibration is not None and finding != "imatrix":
        text = f"is read by scales: imatrix only, and here scales are {finding or 'of no use'}; remove it (null)"
        yield Problem(("quantize", "calibration"), text)
    for scheme in schemes:
        multiple = scheme.group_multiple
        if multiple is not None and quantize.group_size is not None and quantize.group_size % multiple:
            size = quantize.group_size
            text = f"{size} is no multiple of {multiple}, as the backend asks; give {multiple}, 64 or 128"
            yield Problem(("quantize", "group_size"), text)
    if quantize.embedding_group_size is not None and quantize.embedding == "none":
        text = "given, but embedding is none; remove it, or choose embedding: 8w or 4w"
        yield Problem(("quantize", "embedding_group_size"), text)


def _taken(settings: BuildSettings) -> Iterator[Problem]:
    """A scheme that the backend does not take would be unpacked at each step, slower than no scheme at all."""
    backend = settings.lower.backend

    def taken(row: LinearScheme) -> bool:
        return backend in row.backends

    for key, name in (("linear", settings.quantize.linear), ("lm_head", settings.quantize.lm_head)):
        scheme = LINEAR_SCHEMES[name] if name is not None else None
        if scheme is not None and not taken(scheme):
            what = f"{name} layer (weights of {scheme.weight_bits} bits, {scheme.activation} input)"
            yield Problem(("quantize", key), f"{backend} takes no {what}; choose {_names(taken)}")


def _grouped(scheme: LinearScheme) -> bool:
    return scheme.grouped


def _grouped_4_bit(scheme: LinearScheme) -> bool:
    return scheme.grouped and scheme.weight_bits == 4


def _names(fits: Callable[[LinearScheme], bool]) -> str:
    return " or ".join(name for name, scheme in LINEAR_SCHEMES.items() if scheme is not None and fits(scheme))


def _export(settings: BuildSettings) -> Iterator[Problem]:
    export, cache = settings.export, settings.cache
    if export.max_prefill_length is not None and export.max_prefill_length > cache.max_length:
        text = f"{export.max_prefill_length} tokens do not fit cache.max_length {cache.max_length}; give at most that"
        yield Problem(("export", "max_prefill_length"), text)
    if cache.placement == "io" and export.attention == "custom":
        text = (
            "io does not go with export.attention custom: llama::update_cache writes into the cache in place, "
            "which a program's inputs do not allow; set export.attention: portable"
        )
        yield Problem(("cache", "placement"), text)
    beside = next((name for name in export.methods if name != "forward"), None)
    if cache.placement == "io" and beside is not None:
        text = (
            f"{beside} shares cache buffers with forward, and with cache.placement io there are none; "
            "set methods: [forward], or cache.placement: buffer"
        )
        yield Problem(("export", "methods"), text)
    yield from _verify(export, cache)


def _verify(export: ExportSettings, cache: CacheSettings) -> Iterator[Problem]:
    if "verify" not in export.methods:
        if "max_draft_tokens" in export.model_fields_set:
            text = "is about the method verify, which export.methods does not list; add it, or remove this"
            yield Problem(("export", "max_draft_tokens"), text)
        return
    if cache.batch_size > 1:
        text = f"verify takes one sequence, and cache.batch_size is {cache.batch_size}; set it to 1, or leave it out"
        yield Problem(("export", "methods"), text)
    if export.max_draft_tokens >= cache.max_length:
        text = (
            f"{export.max_draft_tokens} tokens and the one before them do not fit cache.max_length {cache.max_length}; "
            "give fewer"
        )
        yield Problem(("export", "max_draft_tokens"), text)


def _top_k(settings: BuildSettings) -> Iterator[Problem]:
    count, check = settings.export.top_k, settings.check
    if count is None:
        return
    if settings.cache.batch_size > 1:
        text = f"takes one sequence, and cache.batch_size is {settings.cache.batch_size}; set that to 1, or remove this"
        yield Problem(("export", "top_k"), text)
    lost = f"takes the logits of all tokens, and with export.top_k the program gives {count}; remove it (null)"
    for name in ("quantized", "unquantized"):
        for limit in ("max_mean_kl", "max_kl_over_rounding", "max_perplexity_ratio"):
            if getattr(getattr(check, name), limit, None) is not None:
                yield Problem(("check", name, limit), lost)
    if check.perplexity is not None and check.long_prompt is None and not check.to_the_end:
        yield Problem(("check", "perplexity"), lost)


def _check(check: CheckSettings) -> Iterator[Problem]:
    if check.perplexity is None and check.long_prompt is not None:
        yield Problem(("check", "long_prompt"), "is taken from check.perplexity.text, which is not given")
    if check.perplexity is None and not (check.prompts or check.token_ids) and check.to_the_end:
        text = "repeats check.perplexity.text or check.prompts, and neither is given; give one, or set it to false"
        yield Problem(("check", "to_the_end"), text)
    for name in ("quantized", "unquantized"):
        limits = getattr(check, name)
        if limits.max_perplexity_ratio is not None and check.perplexity is None:
            text = "no perplexity is measured without check.perplexity.text; give a text, or remove the limit"
            yield Problem(("check", name, "max_perplexity_ratio"), text)
        if _has_prompts(check):
            continue
        for limit in ("min_equal_prompts", "max_margin", "max_logit_difference", "max_mean_kl"):
            if getattr(limits, limit) is not None:
                yield Problem(
                    ("check", name, limit), "there is no prompt to compare; give check.prompts, or remove the limit"
                )


def _has_prompts(check: CheckSettings) -> bool:
    return bool(check.prompts or check.audio or check.long_prompt is not None or check.to_the_end)


def _rounding(settings: BuildSettings) -> Iterator[Problem]:
    check, quantize = settings.check, settings.quantize
    if check.quantized.max_kl_over_rounding is None:
        return
    keys = ("check", "quantized", "max_kl_over_rounding")
    rows = [LINEAR_SCHEMES[name] for name in (quantize.linear, quantize.lm_head or quantize.linear)]
    if not any(row is not None and row.activation == "int8_dynamic" for row in rows):
        schemes = ", ".join(name for name, row in LINEAR_SCHEMES.items() if row and row.activation == "int8_dynamic")
        text = (
            f"without a linear scheme that quantizes activations ({schemes}) no rounding is measured; remove the limit"
        )
        yield Problem(keys, text)
    elif not _has_prompts(check):
        yield Problem(keys, "there is no prompt to compare; give check.prompts, or remove the limit")


def _lengths(check: CheckSettings, max_length: int) -> Iterator[Problem]:
    room = f"cache.max_length is {max_length}"
    if (check.prompts or check.to_the_end) and check.steps >= max_length:
        yield Problem(("check", "steps"), f"{check.steps} steps and a prompt do not fit: {room}; give fewer steps")
    if check.long_prompt is not None and check.long_prompt + check.steps > max_length:
        text = (
            f"{check.long_prompt} tokens and {check.steps} steps do not fit: {room}; shorten it, or give a longer cache"
        )
        yield Problem(("check", "long_prompt"), text)
    if check.perplexity is not None and check.perplexity.window > max_length:
        text = f"{check.perplexity.window} tokens do not fit: {room}; give at most that"
        yield Problem(("check", "perplexity", "window"), text)
