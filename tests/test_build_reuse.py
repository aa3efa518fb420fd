"""What the next build of a tiny random model reuses of the one before it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from pipeline.artifacts import Package
from pipeline.draft import draft
from pipeline.goldens import Prompt
from pipeline.tasks import text_generation
from runners.goldens import load as load_goldens
from tests import tiny
from tests.workshop import (
    PROMPTS,
    STEPS,
    Workshop,
    eager_tokens,
    report_of,
    session_tokens,
    stages_of,
)

pytestmark = [pytest.mark.export, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]


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
