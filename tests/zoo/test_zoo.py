"""The rows of the zoo against the committed table.

``make zoo`` runs all of them and writes the table anew (the environment variable ZOO_WRITE names a folder that takes
the results). ``make test`` runs those marked ``zoo_ci`` and compares them with it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.zoo import build, results
from tests.zoo.registry import FAMILIES, ROWS
from tests.zoo.row import Cannot, Family, Result, Row
from tests.zoo.table import page

WRITE = Path(os.environ["ZOO_WRITE"]).resolve() if "ZOO_WRITE" in os.environ else None
COMMITTED = results.read() if results.RESULTS.is_file() else {}


class KnownLimitError(Exception):
    """What transformers or ExecuTorch cannot do is still as the registry says."""


def marks(in_ci: bool, cannot: Cannot | None) -> list[pytest.MarkDecorator]:
    found = [pytest.mark.export, pytest.mark.zoo, *([pytest.mark.zoo_ci] if in_ci else [])]
    return found + ([pytest.mark.xfail(strict=True, raises=KnownLimitError, reason=cannot.why)] if cannot else [])


def params_of_rows() -> list[object]:
    return [pytest.param(r, id=r.key, marks=marks(r.placement in r.family.ci, r.family.cannot)) for r in ROWS]


def comparable(result: Result) -> Result:
    """Messages name versions and places: only whether there is one is compared."""
    return replace(result, error=None if result.error is None else "")


def raise_known(cannot: Cannot | None, found: Result) -> None:
    """Raise the error of a row: as a known limit if it is the one that the registry names."""
    if cannot is not None and found.error is not None and cannot.error in found.error:
        raise KnownLimitError(found.error)
    assert found.error is None, found.error


@pytest.mark.parametrize("row", params_of_rows())
def test_row(row: Row, tmp_path: Path) -> None:
    found = build.run(row, tmp_path)
    if WRITE is not None:
        results.write({row.key: found}, WRITE / f"{row.key}.json")
    else:
        assert row.key in COMMITTED, "not in the table: run make zoo"
        assert comparable(found) == comparable(COMMITTED[row.key]), "differs from the table: run make zoo"
    raise_known(row.family.cannot, found)


LONGER = [family for family in FAMILIES if family.longer is not None]


@pytest.mark.parametrize("family", [pytest.param(f, id=f.name, marks=marks(bool(f.ci), f.longer)) for f in LONGER])
def test_more_than_one_token_a_call(family: Family, tmp_path: Path) -> None:
    raise_known(family.longer, build.longer(family, tmp_path))


@pytest.mark.skipif(WRITE is not None, reason="the table is being written")
def test_the_table_is_that_of_the_results() -> None:
    assert list(COMMITTED) == [row.key for row in ROWS], "rows came or went: run make zoo"
    assert results.TABLE.read_text(encoding="utf-8") == page(ROWS, COMMITTED), "docs/zoo.md was edited: run make zoo"


@pytest.mark.skipif(WRITE is not None, reason="the table is being written")
def test_every_row_works_but_those_that_are_known_not_to() -> None:
    broken = {key for key, result in COMMITTED.items() if not result.decodes}
    assert broken == {row.key for row in ROWS if row.family.cannot is not None}


def test_rows_of_the_subset_have_every_kind_of_cache_task_and_placement() -> None:
    chosen = [row for row in ROWS if row.placement in row.family.ci]
    assert {row.family.task for row in chosen} == {family.task for family in FAMILIES}
    assert {row.placement for row in chosen} == {row.placement for row in ROWS}
    kinds = {COMMITTED[row.key].cache for row in chosen if row.key in COMMITTED}
    assert {result.cache for result in COMMITTED.values() if result.decodes} <= kinds
