"""Every configuration in the repository is valid, wherever below configs/ it lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config_reader import read, resolved
from pipeline.config_yaml import parse_file

CONFIGS = Path(__file__).parent.parent / "configs"
FILES = sorted(path for pattern in ("*.yaml", "*.yml") for path in CONFIGS.rglob(pattern))


def test_there_are_configurations():
    assert CONFIGS / "smollm2_135m_8da4w.yaml" in FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(CONFIGS).as_posix())
def test_configuration_is_valid(path: Path):
    is_base = "name" not in parse_file(path).value  # the files that extend it have one
    settings = read(path, ["name=base"] if is_base else [])
    assert settings.name == ("base" if is_base else path.stem)
    if settings.check.perplexity is not None:
        assert settings.check.perplexity.text.is_file()
    assert resolved(settings)["name"] == settings.name


def test_the_base_is_inherited():
    settings = read(CONFIGS / "smollm2_135m_fp32.yaml")
    assert settings.model.licence == "Apache-2.0"
    assert settings.check.prompts[0] == "What is the capital of France?"
    assert len(settings.check.prompts) == 8
    assert read(CONFIGS / "smollm2_135m_8da4w.yaml").quantize.embedding == "8w"
