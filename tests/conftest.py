"""Fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiny


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Llama with tokenizer. Read only: it is shared by the whole run."""
    return tiny.save_llama(tmp_path_factory.mktemp("tiny") / "llama")
