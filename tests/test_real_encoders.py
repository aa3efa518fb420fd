"""Real models without a cache: MiniLM's embeddings and ALBERT's filled masks are those of eager PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline.config_reader import read
from pipeline.load import load
from runners.caller import Caller, text_inputs
from runners.check_report import CheckReport, read_report
from runners.package import Package, open_package
from runners.pooling import pool
from runners.tokenizer import open_tokenizer

CONFIGS = Path(__file__).parent.parent / "configs"
SENTENCES = ["That is a happy person.", "That is a very happy person.", "The ferry leaves the harbour at nine."]
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


@pytest.mark.xdist_group("minilm")
def test_minilm_embeds_as_eager_does(tmp_path: Path) -> None:
    package = built("minilm", tmp_path)
    pteline("check", str(package.path))
    model = load(read(CONFIGS / "minilm.yaml").model).model
    caller, codec = Caller.open(package), open_tokenizer(package)
    assert package.manifest.pooling is not None
    found = []
    for sentence in SENTENCES:
        inputs = text_inputs(codec.encode(sentence))
        with torch.inference_mode():
            hidden = model(input_ids=inputs["tokens"], attention_mask=inputs["attention_mask"]).last_hidden_state
        wanted = pool(hidden, inputs["attention_mask"], package.manifest.pooling)[0]
        ours = torch.tensor(json.loads(pteline("run", str(package.path), sentence, "--json"))["embedding"])
        again = pool(caller.call(inputs)["hidden"], inputs["attention_mask"], package.manifest.pooling)[0]
        torch.testing.assert_close(again, wanted, atol=1e-4, rtol=0)
        torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=0)
        found.append(wanted)
    assert found[0] @ found[1] > 0.8  # two that say the same
    assert found[0] @ found[2] < 0.3  # and one that does not


@pytest.mark.xdist_group("minilm")
def test_minilm_in_eight_bits_is_close(tmp_path: Path) -> None:
    package = built("minilm_8da8w", tmp_path)
    cosines = [case.unquantized.cosine for case in report_of(package).cases]
    assert len(cosines) == 6
    assert all(cosine is not None and cosine > 0.99 for cosine in cosines)
    assert package.program_path.stat().st_size < 30 * MEGABYTE


def test_albert_names_the_same_five(tmp_path: Path) -> None:
    package = built("albert_reactions", tmp_path)
    assert package.manifest.tokenizer is None
    pteline("check", str(package.path))
    report = report_of(package)
    assert report.top_share("unquantized", "equal_top5") == 1.0
    reaction = read(CONFIGS / "albert_reactions.yaml").check.token_ids[0]
    model = load(read(CONFIGS / "albert_reactions.yaml").model).model
    with torch.inference_mode():
        wanted = model(input_ids=torch.tensor([reaction])).logits[0, reaction.index(14)]
    ours = Caller.open(package).call(text_inputs(list(reaction)))["logits"][0, reaction.index(14)]
    assert ours.topk(5).indices.tolist() == wanted.topk(5).indices.tolist()
    assert int(ours.argmax()) == 16  # the C of the acetyl group
