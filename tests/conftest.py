"""Fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests import packages, tiny

if TYPE_CHECKING:  # the pipeline takes seconds to import
    from pipeline.artifacts import Package
    from tests.workshop import Workshop

torch.set_num_threads(1)  # tiny tensors: more threads would only wait for each other


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Llama with tokenizer. Read only: it is shared by the whole run."""
    return tiny.save_llama(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def toy_program() -> packages.Program:
    """The toy model of ``tests/packages.py`` with methods ``forward`` and ``decode``; for tests marked ``export``."""
    return packages.Program(packages.program_bytes("buffer", decode=True), "buffer", ("forward", "decode"))


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    from tests.workshop import Workshop

    return Workshop(tmp_path_factory.mktemp("build"))


@pytest.fixture
def empty(tmp_path: Path) -> Workshop:
    """One for a test that looks at what a failure leaves behind."""
    from tests.workshop import Workshop

    return Workshop(tmp_path)


@pytest.fixture(scope="module")
def two_methods(workshop: Workshop) -> Package:
    """Not quantized, custom attention, cache in buffers."""
    return workshop.build(workshop.config("two_methods", export={"methods": ["forward", "decode"]}), keep=("export",))
