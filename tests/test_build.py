"""From a configuration to a checked package, on tiny random models: whole builds, and what is refused."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pipeline import build as build_module
from pipeline import kept
from pipeline.artifacts import Exported, Package
from runners.errors import UserError
from runners.package import open_package
from runners.pte import read_program
from runners.stock_contract import stock_runner_verdict
from tests import tiny
from tests.stock import stock_texts
from tests.workshop import (
    LENGTH,
    PROMPTS,
    STEPS,
    Workshop,
    bytes_of,
    eager_tokens,
    report_of,
    session_tokens,
    stages_of,
)

pytestmark = [pytest.mark.export, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]

# Whole builds


def test_the_command_line_builds_a_package_that_decodes_as_eager_does(empty: Workshop) -> None:
    done = subprocess.run(
        empty.command(empty.config("m"), "-v"),
        capture_output=True,
        text=True,
        cwd=empty.folder,
        env={**empty.environment(), "OMP_DISPLAY_ENV": "TRUE"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{empty.folder / 'dist' / 'm'}\n"
    stages = [line.split()[0] for line in done.stderr.splitlines() if " cpu " in line]
    before_it_runs = ["load", "quantize", "register", "export", "lower", "emit", "package"]
    assert stages == [*before_it_runs, "draft", "record", "check"]
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr  # it was set before PyTorch was loaded
    assert empty.names() == {"m"}
    assert {path.name for path in (empty.folder / "dist" / "m").iterdir()} == {
        "model.pte",
        "manifest.json",
        "tokenizer.json",
        "chat_template.jinja",
        "goldens.safetensors",
        "report",
    }


def test_an_unquantized_package_says_what_eager_says(two_methods: Package) -> None:
    for prompt in PROMPTS:
        assert session_tokens(two_methods, prompt) == eager_tokens(prompt)
    report = report_of(two_methods)
    assert report["passed"]
    assert [x["name"] for x in report["prompts"]] == ["0", "1", "long", "to_the_end"]
    assert all(x["quantized"]["equal_steps"] == STEPS and x["quantized"]["whole_vocabulary"] for x in report["prompts"])
    assert report["prompts"][3]["prompt_tokens"] + STEPS - 1 == LENGTH
    assert report["perplexity"]["program"] == pytest.approx(report["perplexity"]["quantized"], rel=1e-4)


def test_the_manifest_says_what_was_built(two_methods: Package) -> None:
    manifest = open_package(two_methods.path).manifest  # verifies every file against it
    assert manifest.check is not None
    assert manifest.check.passed
    assert list(manifest.methods) == ["decode", "forward"] or list(manifest.methods) == ["forward", "decode"]
    assert manifest.constant_methods["get_max_seq_len"] == LENGTH
    assert manifest.constant_methods["get_eos_ids"] == [2]
    assert manifest.backends == ["XnnpackBackend"]
    assert {"llama::custom_sdpa.out", "llama::update_cache.out"} <= set(manifest.operators)
    assert manifest.cache is not None
    assert manifest.cache.bytes == 2 * 2 * LENGTH * 2 * 16 * 4
    assert all(m.planned_bytes >= manifest.cache.bytes for m in manifest.methods.values())
    assert {"load", "export", "lower", "emit", "package", "draft", "record", "check"} <= set(manifest.timings)
    assert manifest.config["cache"]["max_length"] == LENGTH
    assert manifest.config["cache"]["placement"] == "buffer"


VARIANTS: dict[str, dict[str, dict[str, object]]] = {
    "portable attention in buffers": {"export": {"attention": "portable", "methods": ["forward", "decode"]}},
    "cache as inputs and outputs": {
        "export": {"attention": "portable"},
        "cache": {"max_length": 64, "placement": "io"},
    },
    "all logits, short calls": {"export": {"logits": "all", "max_prefill_length": 16}},
    "one token a call": {"export": {"max_prefill_length": 1}, "model": {"source": "./llama", "num_layers": 1}},
    "8-bit table": {"quantize": {"embedding": "8w"}},
}


@pytest.mark.parametrize("sections", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_way_to_build_passes_the_exact_check(workshop: Workshop, sections: dict) -> None:
    package = workshop.build(workshop.config("variant", **sections))
    report = report_of(package)
    assert report["passed"]
    assert len(report["prompts"]) == 4
    operators = open_package(package.path).manifest.operators
    custom = sections.get("export", {}).get("attention", "custom") == "custom"
    assert any(name.startswith("llama::") for name in operators) == custom


CLOSE = {
    "chat": True,
    "prompts": PROMPTS,
    "steps": STEPS,
    # Integer products round otherwise than the float32 reference: far less than quantization itself changes, not zero.
    "quantized": {"max_mean_kl": 0.05},
}


@pytest.mark.parametrize(
    "quantize",
    [
        {"linear": "8da4w", "lm_head": "8da8w", "embedding": "8w"},
        {"linear": "8da8w", "embedding": "4w", "embedding_group_size": 32},
    ],
    ids=["4-bit linear, 8-bit head and table", "8-bit linear, grouped 4-bit table"],
)
def test_quantized_packages_are_close_to_eager_of_the_same_weights(workshop: Workshop, quantize: dict) -> None:
    package = workshop.build(workshop.config("quantized", quantize=quantize, check=CLOSE))
    for prompt in report_of(package)["prompts"]:
        assert prompt["quantized"]["mean_kl"] < prompt["unquantized"]["mean_kl"] / 5
        assert 0 < prompt["rounding"]["mean_kl"] < prompt["unquantized"]["mean_kl"] / 5
        assert prompt["rounding"]["max_logit_difference"] > prompt["rounding"]["mean_logit_difference"] > 0
    assert report_of(package)["kl_over_rounding"] > 0
    manifest = open_package(package.path).manifest
    assert manifest.quantization["quantize.linear"].startswith(quantize["linear"])
    assert any(name.startswith("quantized_decomposed::embedding") for name in manifest.operators)
    parameters = manifest.model.parameters  # of which few are left as float32
    assert (package.path / "model.pte").stat().st_size < 2 * parameters


def test_the_stock_runner_writes_the_same_text(workshop: Workshop, tmp_path: Path) -> None:
    model = tiny.llama(tiny.Shape(tied=False))
    # The runner's Python binding gives text out token by token: none may be a part of a character, or end the answer.
    vocabulary = tiny.tokenizer().get_vocab()
    model.lm_head.weight[[i for token, i in vocabulary.items() if not token.isascii() or i < 3]] = 0
    model.save_pretrained(workshop.folder / "ascii")
    tiny.tokenizer().save_pretrained(workshop.folder / "ascii")
    package = workshop.build(workshop.config("stock", model={"source": "./ascii"}))
    verdict = stock_runner_verdict(read_program(package.path / "model.pte"), 300)
    assert verdict.loads, verdict
    files = package.path / "model.pte", package.path / "tokenizer.json"
    texts = stock_texts(*files, PROMPTS, STEPS, tmp_path)
    assert texts == [tiny.tokenizer().decode(session_tokens(package, prompt)) for prompt in PROMPTS]
    assert all(texts)


# Refusals


def test_a_budget_that_is_exceeded_names_what_exceeds_it(workshop: Workshop, two_methods: Package) -> None:
    config, before = workshop.folder / "two_methods.yaml", bytes_of(two_methods.path)
    with pytest.raises(UserError, match=r"lower\.max_delegates: method \w+ has \d+ delegates, the budget allows 1"):
        workshop.build(config, "lower.max_delegates=1")
    with pytest.raises(UserError, match=r"lower\.allowed_undelegated: method \w+ leaves .*llama::custom_sdpa"):
        workshop.build(config, "lower.allowed_undelegated=[aten::embedding.out]")
    everything = sorted({o.name for m in two_methods.manifest.methods.values() for o in m.delegation.undelegated})
    workshop.build(config, f"lower.allowed_undelegated=[{', '.join(everything)}]", "name=allowed")
    assert bytes_of(two_methods.path) == before


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"cache": {"max_length": 257}}, r"cache\.max_length: 257 tokens exceed the 256 positions"),
        ({"quantize": {"linear": "8da4w", "group_size": 96}}, r"quantize\.linear: the group size 96 does not divide"),
        (
            {"check": {"prompts": ["The quick brown fox " * 20], "chat": False, "steps": 8}},
            r"check: prompt 0 has \d+ tokens; with 8 steps it does not fit the cache of 64",
        ),
        (
            {"check": {"perplexity": {"text": "text.txt", "tokens": 5000, "window": 24}}},
            r"check\.perplexity\.tokens: .*text\.txt holds \d+ tokens, 5000 are asked for",
        ),
        (
            {"check": {"perplexity": {"text": "no.txt", "window": 24}}},
            r"check\.perplexity\.text: cannot read .*no\.txt",
        ),
        ({"model": {"source": "./bare"}}, r"model\.source: .*bare has no tokenizer"),
    ],
    ids=["cache too long", "group size", "prompt too long", "text too short", "no text", "no tokenizer"],
)
def test_what_does_not_fit_is_refused_before_the_long_stages(
    empty: Workshop, monkeypatch: pytest.MonkeyPatch, sections: dict, message: str
) -> None:
    def too_late(*arguments: object) -> Exported:
        raise AssertionError("exported")

    monkeypatch.setattr(build_module, "export", too_late)
    tiny.save_llama(empty.folder / "bare", with_tokenizer=False)
    with pytest.raises(UserError, match=message):
        empty.build(empty.config("bad", **sections))
    assert empty.names() == set()


def test_a_folder_that_is_no_kept_export_is_refused_and_left_alone(empty: Workshop) -> None:
    precious = empty.folder / "dist" / "m.export" / "notes.txt"
    precious.parent.mkdir(parents=True)
    precious.write_text("mine")
    with pytest.raises(UserError, match=r"m\.export exists and is not of a build"):
        empty.build(empty.config("m"), keep=("export",))
    assert precious.read_text() == "mine"
    assert empty.names() == {"m.export"}


def test_a_stage_cache_that_cannot_be_written_costs_nothing(
    workshop: Workshop, two_methods: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(recorded: object, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept, "write_recorded", full)
    again = workshop.build(workshop.folder / "two_methods.yaml", "name=again", "check.steps=6")
    assert again.manifest.check is not None
    assert stages_of(again)["record"] is False


def test_a_build_that_is_told_to_end_leaves_nothing_behind(empty: Workshop) -> None:
    command = empty.command(empty.config("m"), "-v", "--keep", "export")
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=empty.folder, env=empty.environment()
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("export"):  # and now it lowers
                break
        assert len(empty.names()) > 2  # both hidden directories, and the lock
        process.terminate()
        process.communicate()
    assert process.returncode == 143
    assert empty.names() == set()


def test_an_unknown_stage_to_keep_is_refused(empty: Workshop) -> None:
    command = empty.command(empty.config("m"), "--keep", "lower")
    done = subprocess.run(command, capture_output=True, text=True, cwd=empty.folder, env=empty.environment())
    assert done.returncode == 2
    assert done.stderr == "error: --keep lower: no such stage result; accepted: export\n"
    assert empty.names() == set()
