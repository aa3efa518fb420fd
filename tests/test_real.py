"""The real model, whole: SmolLM2-135M-Instruct is built, checked, run and held against the stock runner. Minutes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runners.check_report import CheckReport, read_report
from runners.package import Package, open_package
from runners.pte import read_program
from runners.stock_contract import stock_runner_verdict
from runners.template import open_template
from tests.stock import stock_texts

CONFIGS = Path(__file__).parent.parent / "configs"
QUESTION = "What is the capital of France?"
SURE = "Count from 1 to 12, separated by commas."  # no near tie in the answer: rounding decides nothing
MEGABYTE = 1_000_000

pytestmark = pytest.mark.real


def pteline(*arguments: str) -> str:
    """What the command prints; its other output goes to this test's own."""
    command = [sys.executable, "-m", "pipeline.cli", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ, check=False)
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}"
    return done.stdout


def built(name: str, folder: Path) -> Package:
    pteline("build", str(CONFIGS / f"{name}.yaml"), "--verbose", "--set", f"package.directory={folder}")
    return open_package(folder / name)


def report_of(package: Package) -> CheckReport:
    return read_report(package.path / "report" / "check.json")


def answer(package: Package, question: str) -> str:
    return pteline("run", str(package.path), question, "--max-new-tokens", "48").rstrip("\n")


def assert_stock_runner_agrees(package: Package, folder: Path, question: str) -> None:
    """The stock runner gives the text of ``pteline run``, up to the end-of-sequence token, which it prints."""
    verdict = stock_runner_verdict(read_program(package.program_path), package.manifest.model.vocabulary_size)
    assert verdict.loads, verdict.reasons
    template, tokenizer = open_template(package), package.tokenizer_path
    assert template is not None
    assert tokenizer is not None
    prompt = template.render([{"role": "user", "content": question}])
    (theirs,) = stock_texts(package.program_path, tokenizer, [prompt], 48, folder)
    assert theirs.removesuffix("<|im_end|>") == answer(package, question)


@pytest.mark.xdist_group("fp32")
def test_float32_is_eager(tmp_path: Path) -> None:
    package = built("smollm2_135m_fp32", tmp_path)
    report = report_of(package)
    assert report.equal_share("quantized") == 1.0
    assert {"long", "to_the_end"} < {prompt.name for prompt in report.prompts}
    assert max(prompt.quantized.max_logit_difference for prompt in report.prompts) <= 1e-3
    assert "Paris" in answer(package, QUESTION)
    assert_stock_runner_agrees(package, tmp_path, QUESTION)
    pteline("check", str(package.path))


@pytest.mark.xdist_group("8da4w")
def test_four_bits_are_small_and_close(tmp_path: Path) -> None:
    package = built("smollm2_135m_8da4w", tmp_path)
    report = report_of(package)
    assert report.equal_share("quantized") >= 7 / 8
    assert report.perplexity is not None
    assert report.perplexity.ratio("quantized") <= 1.01
    assert report.perplexity.ratio("unquantized") <= 1.22
    assert package.program_path.stat().st_size <= 125 * MEGABYTE
    assert "Paris" in answer(package, QUESTION)
    assert_stock_runner_agrees(package, tmp_path, SURE)
    pteline("check", str(package.path))


@pytest.mark.xdist_group("8da4w")
def test_eight_bits_are_closer(tmp_path: Path) -> None:
    report = report_of(built("smollm2_135m_8da8w", tmp_path))
    assert report.perplexity is not None
    assert report.perplexity.ratio("unquantized") <= 1.04
