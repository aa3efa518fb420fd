"""Models that need the number of earlier tokens as a number are noticed, and get one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipeline.artifacts import Quantized
from pipeline.config import CacheSettings, ExportSettings
from pipeline.counting import watched_counting
from pipeline.register import register
from tests.zoo import build, encoder_decoders, families
from tests.zoo.row import Family, Row

TABLE = torch.arange(64)
NEED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "counts on": lambda past: torch.arange(past, past + 3, device="cpu", dtype=torch.int64),
    "counts on by name": lambda past: torch.arange(start=past, end=past + 3),
    "fills a tensor": lambda past: torch.arange(past, past + 3, out=torch.empty(3, dtype=torch.int64)),
    "cuts a table": lambda past: TABLE[past : past + 3],
    "cuts an axis of a table": lambda past: TABLE[None][:, past : past + 3][0],
}
ADD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "adds": lambda past: torch.arange(3) + past,
    "looks up": lambda past: TABLE[torch.arange(3) + past],
    "cuts by numbers": lambda past: TABLE[:3] + past,
    "fills a tensor": lambda past: torch.arange(3, out=torch.empty(3, dtype=torch.int64)) + past,
}


@pytest.mark.parametrize(("count", "needs"), [(c, n) for row, n in ((NEED, True), (ADD, False)) for c in row.values()])
def test_what_takes_a_number_is_told_from_what_takes_a_tensor(
    count: Callable[[torch.Tensor], torch.Tensor], needs: bool
) -> None:
    arange = torch.arange
    with watched_counting() as counting:
        assert count(torch.tensor([5])).tolist() == [5, 6, 7]
    assert counting.needs_number == needs
    assert torch.arange is arange


def family(name: str) -> Family:
    return next(each for each in (*families.FAMILIES, *encoder_decoders.FAMILIES) if each.name == name)


@pytest.mark.parametrize(("name", "needs"), [("ctrl", True), ("xglm", True), ("llama", False), ("gpt2", False)])
def test_a_cache_counts_as_its_model_asks(name: str, needs: bool) -> None:
    registered = register(Quantized(family(name).model(), {}), CacheSettings(max_length=32), ExportSettings())
    assert registered.cache is not None
    assert registered.cache.counts_by_number == needs


@pytest.mark.export
@pytest.mark.parametrize("name", ["ctrl", "mvp"])
def test_such_a_model_decodes_as_eager_does(name: str, tmp_path: Path) -> None:
    found = build.run(Row(family(name), "buffer"), tmp_path)
    assert found.error is None
    assert found.decodes
