"""Wrong programs of a tiny random model do not pass the check."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AttentionInterface

from pipeline import attention
from pipeline import build as build_module
from pipeline import register as register_module
from pipeline.artifacts import Exported, Package
from pipeline.caches.device_layers import CustomLayer, each_a_sequence
from runners.errors import CheckFailedError
from tests.workshop import (
    PROMPTS,
    STEPS,
    Workshop,
    bytes_of,
)

pytestmark = [pytest.mark.export, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]


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
    _, h, s, d = query.shape
    rows = query.reshape(key.shape[0], -1, s, d).transpose(1, 2)
    out = torch.ops.llama.custom_sdpa(rows, key, value, mask, None, 0.0, False, scaling)
    return out.transpose(0, 1).reshape(1, s, h, d), None


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
        torch.ops.llama.update_cache(each_a_sequence(keys), self.keys, call.start + 1)
        torch.ops.llama.update_cache(each_a_sequence(values), self.values, call.start)
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
