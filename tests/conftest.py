"""Fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import packages, tiny

torch.set_num_threads(1)  # tiny tensors: more threads would only wait for each other


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Llama with tokenizer. Read only: it is shared by the whole run."""
    return tiny.save_llama(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def toy_program() -> packages.Program:
    """The toy model of ``tests/packages.py`` with methods ``forward`` and ``decode``; for tests marked ``export``."""
    return packages.Program(packages.program_bytes("buffer", decode=True), "buffer", ("forward", "decode"))
