"""Gemma 3 270M, whole: windows and full layers in one model, past the window. Only where its terms were accepted.

Run it with ``PTELINE_GEMMA=1 pytest tests/test_real_gemma.py``: it downloads 253 MB under the Gemma terms of use.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runners.check_report import read_report
from tests.test_real import built

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        not os.environ.get("PTELINE_GEMMA"), reason="the weights are under the Gemma terms: set PTELINE_GEMMA=1"
    ),
]

WINDOW, CONTEXT = 512, 1024
BYTES_A_POSITION = 2 * 256 * 4  # keys and values of one head of 256, float32


def test_tokens_past_the_window_are_eagers_and_the_cache_is_as_long_as_the_window(tmp_path: Path) -> None:
    package = built("gemma3_270m_fp32", tmp_path)
    cache = package.manifest.cache
    assert cache is not None
    assert cache.bytes == sum(t.bytes for t in cache.tensors) == (15 * WINDOW + 3 * CONTEXT) * BYTES_A_POSITION
    report = read_report(package.path / "report" / "check.json")
    (long,) = [prompt for prompt in report.prompts if prompt.name == "long"]
    assert long.prompt_tokens == 600
    assert (long.quantized.steps, long.quantized.equal_steps) == (64, 64)
    assert report.passed
