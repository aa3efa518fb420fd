"""Programs that choose tokens themselves (``export.top_k``): held against torch.topk of the same program's logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from torch import nn
from torch.export import Dim

from pipeline.artifacts import Package
from pipeline.build import BuildOptions, build
from pipeline.config_reader import read
from pipeline.passes.top_k import top_k
from pipeline.stage_cache import StageCache
from pipeline.stages import Stages
from runners.batch import BatchSession
from runners.bench import Workload, measure
from runners.check_report import read_report
from runners.choices import Choices
from runners.errors import CheckFailedError, UserError
from runners.generate import generate
from runners.inspect import inspect
from runners.machine import describe
from runners.package import open_package
from runners.sampling import Sampler, Sampling, greedy
from runners.session import Session
from runners.speculation import Speculation
from tests import tiny
from tests.test_runners_cli import command

__all__ = ["command"]  # a fixture: the command line in this process

pytestmark = [pytest.mark.export, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]

LENGTH, VOCABULARY, N = 64, 300, 5
BUFFER = {"methods": ["forward", "decode", "verify"], "max_draft_tokens": 3}
IO = {"methods": ["forward"], "attention": "portable", "logits": "all"}


# The pass


class Scores(nn.Module):
    """Logits of random weights, and a second output behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.head(x), x + 1


@pytest.mark.parametrize("count", [1, 2, 3, 64, VOCABULARY])
@pytest.mark.parametrize("tokens", [1, 7])
def test_the_pass_gives_what_topk_gives_and_leaves_the_other_outputs_alone(count: int, tokens: int) -> None:
    model, x = Scores().eval(), torch.randn(1, 4, 8)
    shapes = {"x": {1: Dim("tokens", min=1, max=9)}}
    program = torch.export.export(model, (x,), dynamic_shapes=shapes, strict=False).run_decompositions({})
    given = torch.randn(1, tokens, 8)
    logits, behind = model(given)
    values, ids, other = top_k(program, count).module()(given)
    wanted = logits.topk(count)
    assert torch.equal(values, wanted.values)
    assert torch.equal(ids, wanted.indices)
    assert torch.equal(other, behind)


def test_more_tokens_than_there_are_is_refused() -> None:
    program = torch.export.export(Scores(), (torch.randn(1, 4, 8),), strict=False).run_decompositions({})
    with pytest.raises(UserError, match=r"^export\.top_k: 301 tokens of a vocabulary of 300; give 300 or less\.$"):
        top_k(program, VOCABULARY + 1)


# Whole programs


def config(folder: Path, name: str, **sections: object) -> Path:
    content = {
        "name": name,
        "model": {"source": "./llama", "licence": "MIT"},
        "cache": {"max_length": LENGTH},
        "export": BUFFER,
        "check": {
            "chat": False,
            "prompts": ["The quick brown fox", "Every morning the baker"],
            "steps": 8,
            "quantized": {"min_equal_prompts": 1.0, "max_logit_difference": 1e-3},
        },
        "package": {"directory": str(folder / "dist")},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**content, **sections}))
    return path


def built(folder: Path, name: str, **sections: object) -> Package:
    settings = read(config(folder, name, **sections))
    return build(settings, BuildOptions(), Stages(Console(quiet=True)), StageCache(folder / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("top_k")
    tiny.save_llama(root / "llama", tiny.Shape(vocabulary=VOCABULARY))
    return root


@pytest.fixture(scope="module")
def plain(folder: Path) -> Package:
    return built(folder, "plain")


@pytest.fixture(scope="module")
def chosen(folder: Path) -> Package:
    return built(folder, "chosen", export={**BUFFER, "top_k": N})


def session_of(package: Package) -> Session:
    return Session.open(open_package(package.path), threads=1)


def ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def require_same(choices: object, logits: object, count: int) -> None:
    assert isinstance(choices, Choices)
    assert isinstance(logits, torch.Tensor)
    wanted = logits.topk(count)
    assert torch.equal(choices.logits, wanted.values)
    assert torch.equal(choices.ids, wanted.indices)


def test_each_method_gives_the_likeliest_of_the_logits_it_would_give(plain: Package, chosen: Package) -> None:
    logits, choices = session_of(plain), session_of(chosen)
    for seed in range(3):
        tokens = ids(20, seed)
        require_same(choices.prefill(tokens[:9]), logits.prefill(tokens[:9]), N)  # through forward
        for token in tokens[9:12]:
            require_same(choices.step(token), logits.step(token), N)  # through decode
        for start in (12, 16):
            several = tokens[start : start + 4]
            require_same(choices.verify(several), logits.verify(several), N)
        require_same(choices.step(tokens[-1]), logits.step(tokens[-1]), N)  # the same place again, after other calls
        assert choices.tokens == logits.tokens
        choices.reset()
        logits.reset()


@pytest.mark.parametrize("count", [1, 3])
def test_a_cache_outside_the_program_and_logits_of_every_token(folder: Path, count: int) -> None:
    cache = {"max_length": LENGTH, "placement": "io"}
    logits = session_of(built(folder, "io", cache=cache, export=IO))
    choices = session_of(built(folder, f"io_{count}", cache=cache, export={**IO, "top_k": count}))
    tokens = ids(12)
    require_same(choices.feed(tokens[:7]), logits.feed(tokens[:7]), count)
    for token in tokens[7:]:
        require_same(choices.step(token), logits.step(token), count)


def answer(package: Package, *, speculates: bool = False) -> tuple[int, ...]:
    session = session_of(package)
    return generate(
        session,
        ids(6) * 3,
        greedy,
        eos_ids=frozenset(),
        max_new_tokens=24,
        emit=lambda _: None,
        speculation=Speculation(session) if speculates else None,
    ).tokens


def test_greedy_text_is_the_same_with_and_without_speculation(plain: Package, chosen: Package) -> None:
    assert answer(chosen) == answer(plain)
    assert answer(chosen, speculates=True) == answer(plain, speculates=True)


def test_the_manifest_names_the_outputs_and_the_stock_runner_is_told_why_not(chosen: Package) -> None:
    methods = open_package(chosen.path).manifest.methods
    for name, rows in {"forward": 1, "decode": 1, "verify": 4}.items():
        assert [(spec.name, spec.dtype, spec.shape) for spec in methods[name].outputs] == [
            ("top_logits", "float32", [1, rows, N]),
            ("top_ids", "int64", [1, rows, N]),
        ]
    verdict = inspect(chosen.path).stock_runner
    assert not verdict.loads
    assert f"forward gives the {N} likeliest tokens and their logits (export.top_k)" in verdict.reasons[0]


def test_the_check_compares_tokens_and_the_logits_that_there_are(plain: Package, chosen: Package) -> None:
    found, whole = (read_report(package.path / "report" / "check.json") for package in (chosen, plain))
    for one, other in zip((*found.prompts, *found.verified), (*whole.prompts, *whole.verified), strict=True):
        assert one.quantized.tokens_equal
        assert (one.quantized.top_k, one.quantized.whole_vocabulary) == (N, False)
        assert 0 < one.quantized.max_logit_difference <= other.quantized.max_logit_difference
        assert one.quantized.mean_kl <= other.quantized.mean_kl + 1e-12


def test_a_limit_that_the_choices_break_fails_the_check(folder: Path) -> None:
    check = {
        "chat": False,
        "prompts": ["The quick brown fox"],
        "steps": 8,
        "quantized": {"max_logit_difference": 1e-9},
    }
    with pytest.raises(CheckFailedError, match=r"max \|Δlogit\|.*max_logit_difference"):
        built(folder, "strict", export={**BUFFER, "top_k": N}, check=check)


# The commands


def test_run_writes_the_same_text(command, plain: Package, chosen: Package) -> None:
    arguments = ("--raw", "--max-new-tokens", "12", "--threads", "1")
    expected = command("run", plain.path, "The quick", *arguments)
    assert expected[0] == 0, expected
    assert command("run", chosen.path, "The quick", *arguments)[:2] == expected[:2]


def test_run_draws_from_the_likeliest_tokens_alone(command, chosen: Package) -> None:
    sampled = ("--raw", "--max-new-tokens", "12", "--threads", "1", "--temperature", "0.8", "--seed", "3")
    texts = {command("run", chosen.path, "The quick", *sampled)[1] for _ in range(2)}
    assert len(texts) == 1
    session, seen = session_of(chosen), set()
    choices, sampler = session.prefill(ids(5)), Sampler(Sampling(temperature=50.0, seed=1))
    assert isinstance(choices, Choices)
    for _ in range(200):
        seen.add(sampler(choices))
    assert seen == set(choices.ids.tolist())


def test_run_refuses_to_draw_from_more_tokens_than_there_are(command, chosen: Package) -> None:
    code, out, err = command("run", chosen.path, "x", "--temperature", "1", "--top-k", str(N + 1))
    assert (code, out) == (2, "")
    assert err == (
        f"error: --top-k is {N + 1}, but the program of 'chosen' gives its {N} likeliest tokens alone: give {N} or "
        "less, or build with a larger export.top_k.\n"
    )


def test_check_and_bench_take_such_a_package(command, chosen: Package) -> None:
    code, out, _ = command("check", chosen.path, "--threads", "1")
    assert code == 0
    assert f"over the {N} likeliest tokens that the program gives" in " ".join(out.split())
    work = Workload(prompt_tokens=8, new_tokens=3, trials=1, warmup=0)
    report = measure([open_package(chosen.path)], work, 1, describe(), lambda stage: None)
    assert report.packages[0].step_seconds.n == 3


def test_a_vocabulary_that_is_too_small_is_refused_by_the_build(folder: Path) -> None:
    with pytest.raises(UserError, match=r"export\.top_k: 301 tokens of a vocabulary of 300"):
        built(folder, "too_many", export={"top_k": VOCABULARY + 1})


def test_a_batch_session_wants_logits(chosen: Package) -> None:
    with pytest.raises(UserError, match="has one row"):
        BatchSession(open_package(chosen.path))
