"""From a configuration to a checked package, on tiny random models: whole builds, what the next one reuses, faults."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from transformers import AttentionInterface

from pipeline import attention, kept
from pipeline import build as build_module
from pipeline import register as register_module
from pipeline.artifacts import Exported, Package
from pipeline.build import BuildOptions, build
from pipeline.caches.device_layers import CustomLayer
from pipeline.config_reader import read
from pipeline.draft import draft
from pipeline.goldens import Prompt
from pipeline.stage_cache import StageCache
from pipeline.stages import Stages
from pipeline.tasks import text_generation
from runners.errors import CheckFailedError, UserError
from runners.generate import generate
from runners.goldens import load as load_goldens
from runners.package import open_package
from runners.pte import read_program
from runners.session import Session
from runners.stock_contract import stock_runner_verdict
from runners.tokenizer import open_tokenizer
from tests import tiny
from tests.stock import stock_texts

pytestmark = [pytest.mark.export, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]

ROOT = Path(__file__).parents[1]
LENGTH, STEPS = 64, 8
PROMPTS = ["The quick brown fox", "Every morning the baker"]
EXACT = {"min_equal_prompts": 1.0, "max_logit_difference": 1e-3, "max_perplexity_ratio": 1.001}


class Workshop:
    """A folder with a tiny model, a text and a stage cache; builds packages in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tiny.save_llama(folder / "llama")
        (folder / "text.txt").write_text(tiny.TRAINING_TEXT)

    def config(self, name: str, **sections: dict[str, object]) -> Path:
        """Write a configuration; ``sections`` replace what it says otherwise."""
        check = {
            "chat": False,
            "prompts": PROMPTS,
            "steps": STEPS,
            "long_prompt": 40,
            "to_the_end": True,
            "perplexity": {"text": "text.txt", "tokens": 48, "window": 24},
            "quantized": EXACT,
        }
        content = {
            "name": name,
            "model": {"source": "./llama", "licence": "MIT"},
            "cache": {"max_length": LENGTH},
            "check": check,
            "package": {"directory": str(self.folder / "dist")},
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**content, **sections}))
        return path

    def build(
        self,
        config: Path,
        *overrides: str,
        cache: str | None = "cache",
        console: Console | None = None,
        **options: object,
    ) -> Package:
        """Build in this process."""
        settings = read(config, overrides)
        root = self.folder / cache if cache is not None else None
        return build(settings, BuildOptions(**options), Stages(console or Console(quiet=True)), StageCache(root))

    def command(self, config: Path, *arguments: str) -> list[str]:
        """The command line that builds."""
        return [sys.executable, "-m", "pipeline.cli", "build", str(config), *arguments]

    def environment(self) -> dict[str, str]:
        """For that command line."""
        return {**os.environ, "PTELINE_CACHE": str(self.folder / "command_cache"), "PYTHONPATH": str(ROOT)}

    def names(self) -> set[str]:
        """What lies beside the packages."""
        dist = self.folder / "dist"
        return {path.name for path in dist.iterdir()} if dist.exists() else set()


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("build"))


@pytest.fixture
def empty(tmp_path: Path) -> Workshop:
    """One for a test that looks at what a failure leaves behind."""
    return Workshop(tmp_path)


@pytest.fixture(scope="module")
def two_methods(workshop: Workshop) -> Package:
    """Not quantized, custom attention, cache in buffers."""
    return workshop.build(workshop.config("two_methods", export={"methods": ["forward", "decode"]}), keep=("export",))


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def report_of(package: Package) -> dict:
    return json.loads((package.path / "report" / "check.json").read_text())


def eager_tokens(text: str, steps: int = STEPS) -> list[int]:
    model, ids = tiny.llama(), tiny.tokenizer()(text, return_tensors="pt").input_ids
    generated = model.generate(ids, max_new_tokens=steps, do_sample=False, eos_token_id=None)
    return generated[0, ids.shape[1] :].tolist()


def session_tokens(package: Package, text: str, steps: int = STEPS) -> list[int]:
    opened = open_package(package.path)
    tokens: list[int] = []
    ids = open_tokenizer(opened).encode(text)
    session = Session.open(opened, threads=1)
    greedy: Callable[[torch.Tensor], int] = lambda logits: int(logits.argmax())  # noqa: E731
    generate(session, ids, greedy, eos_ids=frozenset(), max_new_tokens=steps, emit=tokens.append)
    return tokens


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


# What the next build reuses


def stages_of(package: Package) -> dict[str, bool]:
    """Stage -> whether its result came from the cache."""
    return {name: figure.cached for name, figure in package.manifest.timings.items()}


def test_the_same_build_again_takes_every_long_stage_from_the_cache(workshop: Workshop, two_methods: Package) -> None:
    before = (two_methods.path / "model.pte").read_bytes()
    again = workshop.build(workshop.folder / "two_methods.yaml")
    assert stages_of(again) == {"load": False, "emit": True, "record": True, "package": False, "check": False}
    assert (again.path / "model.pte").read_bytes() == before


@pytest.mark.parametrize(
    ("override", "repeated"),
    [
        ("check.quantized.max_margin=0.5", set()),
        ("lower.max_delegates=100", set()),
        ("package.directory={folder}/elsewhere", set()),
        ("check.steps=7", {"record"}),
        ("check.chat=true", {"record"}),
    ],
)
def test_a_setting_repeats_only_what_depends_on_it(
    workshop: Workshop, two_methods: Package, override: str, repeated: set[str]
) -> None:
    config = workshop.folder / "two_methods.yaml"
    again = workshop.build(config, override.format(folder=workshop.folder), "name=again")
    stages = stages_of(again)
    assert {name for name in ("export", "lower", "emit", "record") if stages.get(name) is False} == repeated
    assert (again.path / "model.pte").read_bytes() == (two_methods.path / "model.pte").read_bytes()


def test_another_text_under_the_same_name_is_recorded_anew(workshop: Workshop, two_methods: Package) -> None:
    text = workshop.folder / "text.txt"
    before = text.read_text()
    text.write_text(before[::-1])
    try:
        again = workshop.build(workshop.folder / "two_methods.yaml", "name=again", "check.quantized={}")
        assert stages_of(again)["record"] is False
    finally:
        text.write_text(before)


@pytest.mark.parametrize("guess", [[7], [7, 7, 7, 7, 7, 7, 7, 7]], ids=["one token", "every token"])
def test_a_wrong_draft_changes_no_byte_of_the_goldens(
    workshop: Workshop, two_methods: Package, monkeypatch: pytest.MonkeyPatch, guess: list[int]
) -> None:
    drafted: list[int] = []

    def wrong(directory: Path, prompts: list[Prompt], *rest: object) -> list[torch.Tensor]:
        drafted.append(len(prompts))
        return [torch.tensor(guess) for _ in prompts]

    monkeypatch.setattr(text_generation, "draft", wrong)
    for entry in (workshop.folder / "cache").glob("record-*"):
        shutil.rmtree(entry)
    again = workshop.build(workshop.folder / "two_methods.yaml", "name=again")
    assert drafted == [4]
    goldens = "goldens.safetensors"
    assert (again.path / goldens).read_bytes() == (two_methods.path / goldens).read_bytes()


def test_the_program_drafts_what_it_writes(two_methods: Package) -> None:
    codec = tiny.tokenizer()
    tokens = session_tokens(two_methods, PROMPTS[0])
    prompt = Prompt("0", PROMPTS[0], torch.tensor(codec(PROMPTS[0]).input_ids))
    endless = Prompt("long", prompt.text, prompt.ids, to_eos=False)
    threads = torch.get_num_threads()
    found = draft(two_methods.path, [prompt, endless, prompt], STEPS, [tokens[2]])
    end = tokens.index(tokens[2]) + 1
    assert [ids.tolist() for ids in found] == [tokens[:end], tokens, tokens[:end]]
    assert torch.get_num_threads() == threads


def test_golden_steps_end_with_the_answer(workshop: Workshop, two_methods: Package) -> None:
    """A token that the model writes becomes an end of answers; the prompts that test the cache go on."""
    folder = workshop.folder / "ending"
    shutil.copytree(workshop.folder / "llama", folder)
    tokens = [eager_tokens(prompt) for prompt in PROMPTS]
    eos_id = tokens[0][2]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, eos_id]}))
    package = workshop.build(workshop.config("ending", model={"source": "./ending"}))
    recorded = load_goldens(package.path / "goldens.safetensors").prompts
    expected = [t[: t.index(eos_id) + 1] if eos_id in t else t for t in tokens]
    assert [p.forced.tolist() for p in recorded[:2]] == expected
    assert len(expected[0]) == tokens[0].index(eos_id) + 1 < STEPS
    assert [p.forced.shape[0] for p in recorded[2:]] == [STEPS, STEPS]
    assert [p["quantized"]["steps"] for p in report_of(package)["prompts"]] == [p.forced.shape[0] for p in recorded]


def test_kept_exports_load_and_decode_as_eager_does(two_methods: Package) -> None:
    folder = two_methods.path.with_name("two_methods.export")
    assert {path.name for path in folder.iterdir()} == {"forward.pt2", "decode.pt2", "facts.json"}
    program = torch.export.load(folder / "forward.pt2")
    assert not [node for node in program.graph.nodes if "half_swap" in node.name]  # as exported, not as lowered
    ids = tiny.tokenizer()(PROMPTS[0]).input_ids
    logits = program.module()(tokens=torch.tensor([ids]), position=torch.tensor([0]))
    torch.testing.assert_close(logits, tiny.llama()(torch.tensor([ids])).logits[:, -1:], atol=1e-4, rtol=1e-4)


def test_without_the_check_there_are_no_goldens_and_no_verdict(workshop: Workshop, two_methods: Package) -> None:
    package = workshop.build(workshop.folder / "two_methods.yaml", "name=unchecked", check=False)
    assert package.manifest.check is None
    assert not (package.path / "goldens.safetensors").exists()
    assert session_tokens(package, PROMPTS[0]) == eager_tokens(PROMPTS[0])


def test_a_check_of_nothing_is_no_verdict(workshop: Workshop, two_methods: Package) -> None:
    export = {"methods": ["forward", "decode"]}
    package = workshop.build(workshop.config("nothing", export=export, check={"prompts": []}))
    assert package.manifest.check is None
    assert not (package.path / "goldens.safetensors").exists()


# Wrong programs


def small(workshop: Workshop) -> Path:
    """Two layers: with one, what a token may see of later ones would not show in the last token's logits."""
    check = {"chat": False, "prompts": PROMPTS, "steps": STEPS, "quantized": {"max_logit_difference": 1e-3}}
    return workshop.config("wrong", export={"max_prefill_length": 32}, check=check)


BROKEN = r"prompt 0: max \|Δlogit\| against quantized is .*, at most 0.001 allowed"


def test_a_right_program_passes_that_check(empty: Workshop) -> None:
    assert empty.build(small(empty), cache=None).path.exists()


def test_one_changed_weight_fails_the_check(empty: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    def corrupted(*arguments: object) -> Exported:
        exported = export(*arguments)
        for program in exported.programs.values():
            name = "model.layers.0.mlp.down_proj.weight"
            changed = program.state_dict[name].clone()
            changed[3, 5] += 0.5
            program.state_dict[name] = torch.nn.Parameter(changed, requires_grad=False)
        return exported

    export = build_module.export
    monkeypatch.setattr(build_module, "export", corrupted)
    with pytest.raises(CheckFailedError, match=BROKEN):
        empty.build(small(empty), cache=None)
    assert empty.names() == set()


def sees_the_future(module, query, key, value, mask, scaling=None, **kwargs):
    out = torch.ops.llama.custom_sdpa(query.transpose(1, 2), key, value, mask, None, 0.0, False, scaling)
    return out, None


def forgets_the_first(module, query, key, value, mask, scaling=None, **kwargs):
    return attention.custom(module, query, key.index_fill(1, torch.tensor([0]), 0.0), value, mask, scaling, **kwargs)


def sees_one_more(module, query, key, value, mask, scaling=None, **kwargs):
    return attention.custom(module, query, key, value, mask + 1, scaling, **kwargs)


@pytest.fixture
def only_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a wrong program come as far as the check: the comparison before the export would notice some of them."""
    monkeypatch.setattr(register_module, "require_agreement", lambda *args: None)


@pytest.mark.parametrize("wrong", [sees_the_future, forgets_the_first, sees_one_more])
def test_a_wrong_mask_fails_the_check(empty: Workshop, only_the_check: None, wrong: Callable) -> None:
    AttentionInterface.register("pteline_custom", wrong)
    try:
        with pytest.raises(CheckFailedError, match=BROKEN):
            empty.build(small(empty), cache=None)
    finally:
        AttentionInterface.register("pteline_custom", attention.custom)
    assert empty.names() == set()


def test_keys_that_are_written_one_late_fail_the_check(
    empty: Workshop, only_the_check: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_late(self, keys, values, call):
        torch.ops.llama.update_cache(keys.transpose(1, 2), self.keys, call.start + 1)
        torch.ops.llama.update_cache(values.transpose(1, 2), self.values, call.start)
        return self.keys, self.values

    monkeypatch.setattr(CustomLayer, "update", one_late)
    with pytest.raises(CheckFailedError, match=BROKEN):
        empty.build(small(empty), cache=None)


def test_a_failed_check_prints_its_table_and_leaves_the_earlier_package(
    workshop: Workshop, two_methods: Package
) -> None:
    before = bytes_of(two_methods.path)
    console = Console(file=io.StringIO())
    limit = "check.quantized.max_mean_kl=1e-30"
    with pytest.raises(CheckFailedError, match=r"two_methods is not written, .*\n.*max_mean_kl"):
        workshop.build(workshop.folder / "two_methods.yaml", limit, console=console)
    printed = console.file.getvalue()
    assert "Against eager execution of the package's weights" in printed
    assert "│ to_the_end │" in printed
    assert "check FAILED" in printed
    assert bytes_of(two_methods.path) == before


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
