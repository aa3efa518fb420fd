"""The order of the stages, and which results are kept. The only file that sees the whole configuration."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from pydantic import JsonValue

from pipeline import __version__, kept
from pipeline.artifacts import Emitted, Exported, Loaded, LoadedTokenizer, Package, Quantized
from pipeline.config import BuildSettings
from pipeline.config_reader import resolved
from pipeline.emit import check_budget, emit
from pipeline.export import export
from pipeline.load import load
from pipeline.lower import lower
from pipeline.package import publish, staging, write_content, write_goldens, write_manifest
from pipeline.prompts import calibration_ids, text_ids
from pipeline.quantize import quantize
from pipeline.quick.memory import give_back
from pipeline.record import Recorded
from pipeline.stage_cache import StageCache, key_of, library_versions
from pipeline.stages import Stages
from pipeline.tasks import TASKS, Task
from pipeline.tasks.settings import refuse_idle, refuse_unmeasured
from pipeline.unexpected import explained
from pipeline.verify import verify
from runners.check_render import show
from runners.errors import CheckFailedError, UserError
from runners.manifest import PROGRAM_NAME, CheckSummary, Manifest


@dataclass(frozen=True)
class BuildOptions:
    """What a build is told beside its configuration."""

    check: bool = True  # run the check before the package gets its name
    keep: tuple[str, ...] = ()  # "export": also keep the exported programs, as <package>.export/<method>.pt2


def build(settings: BuildSettings, options: BuildOptions, stages: Stages, cache: StageCache) -> Package:
    """Build, check and publish one package.

    Raises:
        UserError: the configuration does not fit the model, the source or the backend.
        CheckFailedError: the package ran, and breaks a limit of its configuration. What was there before stays.
    """
    target = settings.package.directory / settings.name
    export_target = target.with_name(f"{target.name}.export")
    with ExitStack() as stack:
        directory = stack.enter_context(staging(target))
        keeps_export = "export" in options.keep
        export_directory = stack.enter_context(staging(export_target, kept.FACTS)) if keeps_export else None
        line = _Line(settings, directory, stages, cache)
        tokenizer = line.tokenizer  # what is missing or does not fit is found before the long stages
        refuse_idle(settings, line.task.name, line.task.settings)
        is_checked = line.task.is_checked(settings.check)
        if not is_checked:
            refuse_unmeasured(settings.check)
        checks = options.check and is_checked  # of nothing there is no verdict
        if checks:
            line.prepared  # noqa: B018  # for what it refuses
        if export_directory is not None:
            kept.write_exported(line.exported, export_directory)  # before lowering, which rewrites the programs
        emitted = line.emitted
        check_budget(emitted.facts.methods, settings.lower)
        with stages.stage("package"):
            write_content(directory, emitted, tokenizer)
            manifest = write_manifest(directory, _manifest(settings, line.loaded, tokenizer, emitted))
        if checks:
            recorded = line.recorded  # with the help of the package, which runs by now
            line.forget_models()
            write_goldens(directory, recorded.goldens)
            manifest = _checked(write_manifest(directory, manifest), directory, target, settings, recorded, stages)
        manifest = write_manifest(directory, manifest.model_copy(update={"timings": dict(stages.figures)}))
        if export_directory is not None:
            publish(export_directory, export_target)
        publish(directory, target)
    return Package(target, manifest)


def _checked(
    manifest: Manifest, directory: Path, target: Path, settings: BuildSettings, recorded: Recorded, stages: Stages
) -> Manifest:
    """The manifest with the verdict of the check, which passed."""
    with stages.stage("check") as progress:
        report = verify(directory, settings.check, recorded, progress)
    if not report.passed:
        show(report, stages.console)  # the package, and the report in it, will be gone
        raise CheckFailedError(_failure(target, [found.message for found in report.violations]))
    return manifest.model_copy(update={"check": CheckSummary(passed=True, report="report/check.json")})


class _Line:
    """The stages of one build. Each runs once, and only where a later one needs it and the cache has no result."""

    def __init__(self, settings: BuildSettings, directory: Path, stages: Stages, cache: StageCache) -> None:
        self.settings, self._directory, self._stages, self._cache = settings, directory, stages, cache

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        with explained(name, self._model_name, self._used), self._stages.stage(name):
            yield

    def _model_name(self) -> str:
        is_loaded = "loaded" in vars(self)
        return self.loaded.identity.architecture if is_loaded else self.settings.model.source

    def _used(self) -> Collection[str]:
        return self.task.settings if "loaded" in vars(self) else ()

    @cached_property
    def loaded(self) -> Loaded:
        with self._stage("load"):
            return load(self.settings.model)

    @cached_property
    def task(self) -> Task:
        return TASKS[self.loaded.identity.task]

    @cached_property
    def tokenizer(self) -> LoadedTokenizer | None:
        if self.loaded.tokenizer is None and self.task.needs_tokenizer:
            raise UserError(
                f"model.source: {self.settings.model.source} has no tokenizer, and a package needs one; "
                "add tokenizer.json (or the files it is made from) to the source."
            )
        return self.loaded.tokenizer

    @cached_property
    def prepared(self) -> JsonValue:
        return self.task.prepare(self.loaded, self.settings)

    @cached_property
    def quantized(self) -> Quantized:
        loaded, calibration = self.loaded, self.calibration
        with self._stage("quantize"):
            return quantize(loaded, self.settings.quantize, calibration)

    @cached_property
    def calibration(self) -> torch.Tensor | None:
        return calibration_ids(self.settings.quantize, self.tokenizer) if self.tokenizer is not None else None

    @cached_property
    def exported(self) -> Exported:
        found = self._cache.find("export", self._export_key)
        if found is not None:
            with self._stages.stage("export", cached=True):
                return kept.read_exported(found)
        return self._export()

    @cached_property
    def emitted(self) -> Emitted:
        found = self._cache.find("emit", self._emit_key)
        if found is not None:
            with self._stages.stage("emit", cached=True):
                return kept.read_emitted(found)
        return self._emit()

    @cached_property
    def recorded(self) -> Recorded:
        """Needs the package in its directory, so that it can be run."""
        found = self._cache.find("record", self._record_key)
        if found is not None:
            with self._stages.stage("record", cached=True):
                return kept.read_recorded(found)
        drafts = None
        if self.task.draft is not None:
            with self._stage("draft"):
                drafts = self.task.draft(self.loaded, self.settings, self._directory)
        quantized = self.quantized
        with self._stage("record"):
            recorded = self.task.record(self.loaded, quantized, self.settings, drafts)
            self._cache.store("record", self._record_key, lambda entry: kept.write_recorded(recorded, entry))
        return recorded

    def forget_models(self) -> None:
        """Let the models go: the check runs the program alone."""
        for name in ("loaded", "quantized", "tokenizer"):
            self.__dict__.pop(name, None)
        give_back()

    def _export(self) -> Exported:
        settings, quantized = self.settings, self.quantized
        with self._stage("register"):
            registered = self.task.register(quantized, settings.cache, settings.export)
        with self._stage("export"):
            exported = export(registered, self.task.plan(registered, settings.export), quantized.notes)
            self._cache.store("export", self._export_key, lambda entry: kept.write_exported(exported, entry))
        return exported

    def _emit(self) -> Emitted:
        exported, settings = self.exported, self.settings
        constants = self.task.constant_methods(self.loaded, exported.facts)
        with self._stage("lower"):
            lowered = lower(exported, settings.lower, constants)
        del self.exported, exported  # lowering rewrote the programs, and nobody reads them again
        with self._stage("emit"):
            emitted = emit(lowered, constants, self._directory / PROGRAM_NAME)
            self._cache.store("emit", self._emit_key, lambda entry: kept.write_emitted(emitted, entry))
        del lowered
        give_back()
        return emitted

    @property
    def _weights(self) -> list[JsonValue]:
        model = self.settings.model
        calibration = self.calibration.tolist() if self.calibration is not None else None
        source = [self.loaded.identity.digest, self.task.name, model.num_layers, model.random_weights_seed]
        return [*source, self._dump("quantize"), calibration]

    @property
    def _export_key(self) -> str:
        return key_of(*self._weights, self._dump("cache"), self._dump("export"))

    @property
    def _emit_key(self) -> str:
        tokenizer = self.tokenizer.info.model_dump(mode="json") if self.tokenizer is not None else None
        return key_of(self._export_key, self.settings.lower.backend, tokenizer)

    @property
    def _record_key(self) -> str:
        check = self.settings.check.model_dump(
            mode="json", exclude={"quantized", "unquantized"}
        )  # limits change no golden
        parts: list[JsonValue] = [check, self.settings.cache.max_length, self.prepared]
        if self.tokenizer is not None:
            text = text_ids(self.settings.check, self.tokenizer)
            parts += [text.tolist() if text is not None else None]
            parts += [self.tokenizer.tokenizer_json, self.tokenizer.chat_template]
        return key_of(*self._weights, *parts)

    def _dump(self, section: str) -> JsonValue:
        dumped: JsonValue = getattr(self.settings, section).model_dump(mode="json")
        return dumped


def _manifest(settings: BuildSettings, loaded: Loaded, tokenizer: LoadedTokenizer | None, emitted: Emitted) -> Manifest:
    facts = emitted.facts
    return Manifest(
        schema_version=1,
        name=settings.name,
        created_by=f"pteline {__version__}",
        model=loaded.identity,
        config=resolved(settings),
        quantization=facts.quantization,
        methods=facts.methods,
        constant_methods=facts.constant_methods,
        cache=facts.cache,
        tokenizer=tokenizer.info if tokenizer is not None else None,
        decoding=loaded.extras.decoding,
        audio=loaded.extras.audio,
        image=loaded.extras.image,
        image_prompt=loaded.extras.image_prompt,
        pooling=loaded.extras.pooling,
        labels=loaded.extras.labels,
        backends=facts.backends,
        operators=facts.operators,
        versions=library_versions(),
        timings={},
        check=None,
        files={},
    )


def _failure(target: Path, messages: list[str]) -> str:
    listed = "\n".join(f"  {message}" for message in messages)
    return f"check: {target} is not written, because its program breaks the limits of its configuration:\n{listed}"
