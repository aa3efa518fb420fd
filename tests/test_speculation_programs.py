"""The method ``verify`` in real programs: what it says, what it costs in the file, its check, and the commands."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console

from pipeline.artifacts import Package
from pipeline.build import BuildOptions, build
from pipeline.config_reader import read
from pipeline.stage_cache import StageCache
from pipeline.stages import Stages
from pipeline.tasks.text_generation import plan
from runners.check import run_verify
from runners.check_command import command as check_command
from runners.check_report import read_report
from runners.errors import CheckFailedError, UserError
from runners.generate import Answer, generate
from runners.goldens import GoldenPrompt, Goldens, save, summarise
from runners.manifest import GOLDENS_NAME, Manifest
from runners.package import open_package
from runners.pte import read_program
from runners.sampling import greedy
from runners.session import Session
from runners.speculation import Speculation
from runners.stock_contract import stock_runner_verdict
from tests import packages, tiny
from tests.packages import LONGEST, L, V, eager_logits, program_bytes, write_package
from tests.test_runners_cli import command

__all__ = ["command"]  # a fixture: the command line in this process

pytestmark = [pytest.mark.export, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]

VOCABULARY, LENGTH, DRAFT = 8000, 128, 4
SHAPE = tiny.Shape(vocabulary=VOCABULARY)
LIKELY = 8  # tokens
TIE = 0.01  # logits: closer ones may change places by rounding
METHODS = ("forward", "decode", "verify")


def ids(count: int, seed: int = 0, vocabulary: int = V) -> list[int]:
    return torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


# A tiny random Llama, quantized, with a large vocabulary


def config(folder: Path, name: str, **export: object) -> Path:
    content = {
        "name": name,
        "model": {"source": "./llama", "licence": "MIT"},
        "cache": {"max_length": LENGTH},
        "quantize": {"linear": "8da4w", "lm_head": "8da8w", "embedding": "8w"},
        "export": export,
        "check": {"chat": False, "prompts": ["The quick brown fox", "Every morning"], "steps": 24},
        "package": {"directory": str(folder / "dist")},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def built(config: Path, *overrides: str) -> Package:
    options = BuildOptions()
    return build(read(config, overrides), options, Stages(Console(quiet=True)), StageCache(config.parent / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("speculation")
    model = tiny.llama(SHAPE)
    model.model.embed_tokens.weight[LIKELY:] *= 0.01  # a random model that chooses among few tokens repeats itself
    model.save_pretrained(root / "llama")
    tiny.tokenizer().save_pretrained(root / "llama")
    return root


@pytest.fixture(scope="module")
def llama(folder: Path) -> Package:
    return built(config(folder, "verify", methods=["forward", "verify"], max_draft_tokens=DRAFT))


def test_weights_are_in_the_file_once(folder: Path, llama: Package) -> None:
    alone = built(config(folder, "alone", methods=["forward"])).path / "model.pte"
    both = llama.path / "model.pte"
    head = VOCABULARY * SHAPE.hidden  # bytes of the output layer in 8 bits; the table of embeddings has as many
    assert alone.stat().st_size > 2 * head
    assert both.stat().st_size - alone.stat().st_size < head / 4


def test_the_manifest_says_how_many_tokens_it_takes_and_the_stock_runner_minds_nothing(llama: Package) -> None:
    method = open_package(llama.path).manifest.methods["verify"]
    assert [(spec.name, spec.min_shape, spec.shape) for spec in method.inputs] == [
        ("tokens", [1, 1], [1, DRAFT + 1]),
        ("position", [1], [1]),
    ]
    assert [(spec.min_shape, spec.shape) for spec in method.outputs] == [
        ([1, 1, VOCABULARY], [1, DRAFT + 1, VOCABULARY])
    ]
    assert llama.manifest.constant_methods["get_max_seq_len"] == LENGTH
    verdict = stock_runner_verdict(read_program(llama.path / "model.pte"), 300)
    assert verdict.loads, verdict.reasons


@pytest.fixture(scope="module")
def portable(folder: Path) -> Package:
    settings = {"methods": ["forward", "verify"], "max_draft_tokens": DRAFT, "attention": "portable"}
    return built(config(folder, "portable", **settings))


def test_with_portable_attention_logits_have_the_bits_of_single_calls(portable: Package) -> None:
    session = Session.open(open_package(portable.path), threads=1)
    for start in (0, 1, 30, 100):
        for single, several in single_and_several(session, start):
            assert torch.equal(single, several)


def test_with_custom_attention_they_are_close_to_them(llama: Package) -> None:
    session = Session.open(open_package(llama.path), threads=1)
    for start in (0, 1, 30):
        for single, several in single_and_several(session, start):
            torch.testing.assert_close(single, several, rtol=1e-5, atol=1e-4)


def single_and_several(session: Session, start: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Logits of 1 to DRAFT + 1 tokens from a position on, by as many calls and by one call."""
    tokens = ids(start + DRAFT + 1, seed=start, vocabulary=VOCABULARY)
    for count in range(1, DRAFT + 2):
        session.reset()
        if start:
            session.prefill(tokens[:start])
        single = torch.stack([session.step(token).clone() for token in tokens[start : start + count]])
        session.rewind(start)
        yield single, session.verify(tokens[start : start + count])


class Chooser:
    """Greedy choice that remembers by how much it was the best."""

    def __init__(self) -> None:
        self.margin = float("inf")

    def __call__(self, logits: torch.Tensor) -> int:
        best = logits.topk(2).values
        self.margin = min(self.margin, float(best[0] - best[1]))
        return greedy(logits)


def answered(session: Session, prompt: list[int], choose: Chooser, *, speculates: bool) -> Answer:
    """To the last position of the cache."""
    session.reset()
    return generate(
        session,
        prompt,
        choose,
        eos_ids=frozenset(),
        max_new_tokens=LENGTH,
        emit=lambda _: None,
        speculation=Speculation(session) if speculates else None,
    )


def test_speculation_writes_what_plain_decoding_writes(llama: Package) -> None:
    session = Session.open(open_package(llama.path), threads=1)
    accepted, compared = 0, 0
    for seed in range(8):
        prompt, choose = ids(9, seed, LIKELY) * 3, Chooser()
        plain = answered(session, prompt, choose, speculates=False)
        held = session.tokens
        if choose.margin < TIE:
            continue
        found = answered(session, prompt, Chooser(), speculates=True)
        assert (found.tokens, found.finish, session.tokens) == (plain.tokens, plain.finish, held)
        assert found.acceptance is not None
        accepted += found.acceptance.accepted
        compared += 1
    assert compared > 1
    assert accepted > 20 * compared


def test_the_check_runs_the_prompts_through_verify_as_well(llama: Package) -> None:
    report = read_report(llama.path / "report" / "check.json")
    assert [prompt.name for prompt in report.verified] == [prompt.name for prompt in report.prompts] == ["0", "1"]
    for one, other in zip(report.prompts, report.verified, strict=True):
        assert other.quantized.whole_vocabulary
        assert other.quantized.mean_kl == pytest.approx(one.quantized.mean_kl, rel=0.5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["cache.placement=io", "export.attention=portable"],
            "verify shares cache buffers with forward",
        ),
        (["cache.batch_size=2"], "verify takes one sequence, and cache.batch_size is 2"),
        (["export.max_draft_tokens=128"], "128 tokens and the one before them do not fit cache.max_length 128"),
        (["export.methods=[forward]"], "is about the method verify, which export.methods does not list"),
    ],
)
def test_what_cannot_be_built_is_refused_when_it_is_read(folder: Path, overrides: list[str], message: str) -> None:
    path = config(folder, "refused", methods=["forward", "verify"], max_draft_tokens=DRAFT)
    with pytest.raises(UserError, match=message):
        read(path, overrides)


@pytest.mark.parametrize(("kind", "what"), [("sliding", "a sliding window"), ("conv", "a recurrent state")])
def test_a_cache_that_cannot_go_back_is_refused(folder: Path, kind: str, what: str) -> None:
    from pipeline.artifacts import Quantized
    from pipeline.register import register

    settings = read(config(folder, "window", methods=["forward", "verify"]))
    registered = register(Quantized(tiny.llama(), {}), settings.cache, settings.export)
    assert registered.layout is not None
    tensors = [registered.layout.tensors[0].model_copy(update={"kind": kind}), *registered.layout.tensors[1:]]
    registered = replace(registered, layout=registered.layout.model_copy(update={"tensors": tensors}))
    with pytest.raises(UserError, match=rf"verify takes back .* LlamaForCausalLM has layers with {what}"):
        plan(registered, settings.export)


# The toy model, and the commands


def golden(name: str, prompt: list[int], steps: int = 12) -> GoldenPrompt:
    tokens = list(prompt)
    for _ in range(steps - 1):
        tokens.append(int(eager_logits(tokens)[-1].argmax()))
    reference = summarise(eager_logits(tokens)[-steps:])
    return GoldenPrompt(name, name, torch.tensor(prompt), reference.tokens, reference, reference)


def toy(folder: Path, program: bytes) -> Path:
    folder.mkdir()
    save(Goldens((golden("0", ids(3)), golden("one", [7]), golden("end", ids(L - 11, 1))), None), folder / GOLDENS_NAME)

    def limited(manifest: Manifest) -> Manifest:
        limits = {"min_equal_prompts": 0.5, "max_logit_difference": 1e-4}
        return manifest.model_copy(update={"config": {"check": {"quantized": limits, "unquantized": {}}}})

    return write_package(folder, packages.Program(program, methods=METHODS), change=limited)


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy(tmp_path_factory.mktemp("right") / "toy", program_bytes("buffer", decode=True, verify=True))


def test_verify_calls_shrink_so_that_every_length_is_checked() -> None:
    class Recorder:
        max_verify = 4

        def __init__(self) -> None:
            self.calls: list[list[int]] = []

        def reset(self) -> None:
            self.calls.append([])

        def prefill(self, tokens: list[int]) -> torch.Tensor:
            self.calls.append(tokens)
            return torch.zeros(1)

        verify = prefill

    recorder = Recorder()
    recorder.verify = lambda tokens: (recorder.calls.append(tokens), torch.zeros(len(tokens), V))[1]
    rows = run_verify(recorder, golden("0", [1, 2, 3], steps=13))
    assert rows.shape == (13, V)
    assert [len(call) for call in recorder.calls] == [0, 2, 4, 3, 2, 1, 3]
    tokens = [token for call in recorder.calls for token in call]
    assert tokens == [1, 2, 3, *golden("0", [1, 2, 3], steps=13).forced[:-1].tolist()]


def test_a_right_program_passes_and_the_report_shows_both(right: Path, tmp_path: Path, capsys) -> None:
    check_command(right, threads=1, json=tmp_path / "check.json")
    report = read_report(tmp_path / "check.json")
    assert report.passed
    assert [prompt.quantized.equal_steps for prompt in report.verified] == [12] * 3
    printed = capsys.readouterr().out
    assert "The same prompts through the method verify" in printed
    assert printed.count("Against eager execution of the package's weights") == 2


def test_a_verify_that_is_wrong_fails_though_forward_is_right(tmp_path: Path, monkeypatch) -> None:
    exported = packages._exported

    def wrong_verify(placement: packages.Placement, longest: int):
        with pytest.MonkeyPatch.context() as patch:
            if longest == LONGEST["verify"]:
                patch.setattr(packages, "_attend", sees_one_less)
            return exported(placement, longest)

    monkeypatch.setattr(packages, "_exported", wrong_verify)
    folder = toy(tmp_path / "toy", program_bytes("buffer", decode=True, verify=True))
    with pytest.raises(CheckFailedError) as failure:
        check_command(folder, threads=1, json=tmp_path / "check.json")
    messages = str(failure.value).splitlines()[1:]
    assert messages
    assert [message for message in messages if not message.startswith("  through verify: ")] == []
    report = read_report(tmp_path / "check.json")
    assert [prompt.quantized.equal_steps for prompt in report.prompts] == [12] * 3


def sees_one_less(x: torch.Tensor, where: torch.Tensor, cache: torch.Tensor, head: torch.nn.Linear) -> torch.Tensor:
    """``packages._attend`` of a query that does not see its own position, unless that is the first."""
    seen = torch.arange(L)[None, :] <= torch.clamp(where - 1, min=0)[:, None]
    scores = torch.where(seen, x @ cache.transpose(1, 2), torch.full((1, 1), -1e9))
    return head(torch.softmax(scores, -1) @ cache)


def test_run_writes_the_same_text_and_says_how_many_tokens_a_call(right: Path, command) -> None:
    arguments = ("run", right, "over and over and over and over", "--raw", "--max-new-tokens", "30")
    _, plain, _ = command(*arguments)
    code, out, err = command(*arguments, "--speculate", "--stats")
    assert (code, out) == (0, plain)
    assert " tokens a call (" in err
    assert " guesses right); context" in err
    assert "tokens a call" not in command(*arguments, "--stats")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["run", "hi", "--speculate", "--temperature", "0.5"],
            "and --temperature 0.5 draws others",
        ),
        (["bench", "--speculate", "--at", "140"], "--speculate measures right after a prompt: leave --at out"),
    ],
)
def test_options_that_do_not_go_together_are_refused(right: Path, command, arguments, message: str) -> None:
    code, out, err = command(arguments[0], right, *arguments[1:])
    assert (code, out) == (2, "")
    assert message in err


def test_a_comparison_of_packages_does_not_speculate(right: Path, command) -> None:
    assert "leave --against out" in command("bench", right, "--speculate", "--against", right)[2]


@pytest.mark.parametrize("arguments", [["run", "hi", "--speculate"], ["bench", "--speculate"]])
def test_a_package_without_verify_says_how_to_build_one(tmp_path: Path, command, arguments) -> None:
    folder = write_package(tmp_path / "toy", packages.Program(b"x", methods=("forward", "decode")))
    code, _, err = command(arguments[0], folder, *arguments[1:])
    assert code == 2
    assert "has no method verify, only forward, decode. Build it with export.methods: [forward, verify]" in err


def test_bench_measures_a_repetitive_and_a_free_text(right: Path, command, tmp_path: Path) -> None:
    sizes = ("--prompt-tokens", "24", "--new-tokens", "20", "--trials", "2", "--warmup", "1")
    code, out, _ = command("bench", right, "--speculate", *sizes, "--json", tmp_path / "bench.json")
    assert code == 0
    assert out.count("times plain decoding") == 2
    found = json.loads((tmp_path / "bench.json").read_text())["speculation"]
    assert [task["name"] for task in found] == ["a repeated passage", "free text"]
    for task in found:
        assert (task["prompt_tokens"], task["tokens"], task["equal_tokens"]) == (24, 21, 21)
        assert task["tokens_per_second"]["n"] == task["plain_tokens_per_second"]["n"] == task["ratio"].get("n", 2) == 2
        assert task["tokens_per_call"] >= 1
        assert task["drafted"] >= task["accepted"]
    assert io.StringIO(out).readline()
