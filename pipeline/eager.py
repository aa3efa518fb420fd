"""Eager PyTorch for ``pteline check --eager``: the model of a package, loaded anew from its source."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.config import BuildSettings
from pipeline.goldens import Prompt
from pipeline.load import load
from pipeline.prompts import calibration_ids, chat_ids
from pipeline.quantize import quantize
from pipeline.record import Greedy, record_along
from runners.check import FullLogits
from runners.errors import UserError
from runners.goldens import Goldens
from runners.package import Package
from runners.quiet_libraries import quiet_libraries


def references(package: Package, prompts: Sequence[str], steps: int) -> tuple[Goldens, FullLogits]:
    """Load and quantize the model as the package's configuration says, and run both along ``prompts``.

    Raises:
        UserError: the source is not what the package was built from, or cannot be loaded.
    """
    with quiet_libraries():
        settings = BuildSettings.model_validate(package.manifest.config)
        loaded = load(settings.model)
        if loaded.identity.digest != package.manifest.model.digest:
            raise UserError(
                f"check --eager: {settings.model.source} has the digest {loaded.identity.digest}, the package was "
                f"built from {package.manifest.model.digest}; give back the source that it was built from, or build "
                "it again."
            )
        if loaded.tokenizer is None:
            raise UserError(f"check --eager: {settings.model.source} has no tokenizer any more.")
        quantized = quantize(loaded, settings.quantize, calibration_ids(settings.quantize, loaded.tokenizer))
        named = [Prompt(str(i), text, chat_ids(text, loaded.tokenizer)) for i, text in enumerate(prompts)]
        greedy = Greedy(steps, frozenset(loaded.tokenizer.info.eos_ids))
        recorded = record_along(loaded.model, quantized.model, named, greedy)
    return recorded.goldens, recorded.full
