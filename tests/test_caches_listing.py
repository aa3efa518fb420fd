"""``pteline caches``: every class of the installed transformers has a state, and a class that is new is noticed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers.cache_utils
from transformers.cache_utils import DummyLayer
from typer.testing import CliRunner

from pipeline.caches import KNOWN, DeviceCache, entry_of
from pipeline.caches.listing import ListedClass, found_classes, listed_classes
from pipeline.caches.reasons import WHY_NOT
from pipeline.cli import app


@pytest.fixture(scope="module")
def listed() -> dict[str, ListedClass]:
    return {row.name: row for row in listed_classes()}


def test_every_class_of_the_installed_transformers_is_registered_or_has_a_reason(listed) -> None:
    assert [row.name for row in listed.values() if not row.registered and row.name not in WHY_NOT] == []


def test_every_class_of_cache_utils_is_found(listed) -> None:
    c = transformers.cache_utils
    roots = (c.Cache, c.CacheLayerMixin, c.LinearAttentionCacheLayerMixin, c.DummyLayer)
    there = {x.__name__ for x in vars(c).values() if isinstance(x, type) and issubclass(x, roots)}
    assert len(there) > 20
    assert {name for name, row in listed.items() if row.file == "cache_utils.py"} == there


def test_no_reason_is_given_for_a_class_that_is_registered_or_gone(listed) -> None:
    assert set(WHY_NOT) == {row.name for row in listed.values() if not row.registered}


def test_every_registered_class_of_transformers_is_found(listed) -> None:
    names = {entry.cls.__name__ for entry in KNOWN} | {layer.name for entry in KNOWN for layer in entry.model_layers}
    names |= {row.cls.__name__ for entry in KNOWN for row in entry.layers}
    ours = {"DeviceCache", "DeviceEncoderDecoderCache"}
    ours |= {row.cls.__name__ for row in entry_of(DeviceCache).layers if row.cls is not DummyLayer}
    assert names - ours == {row.name for row in listed.values() if row.registered}


def test_a_new_class_is_found_in_however_many_steps_it_derives(tmp_path: Path) -> None:
    (tmp_path / "models" / "new").mkdir(parents=True)
    (tmp_path / "cache_utils.py").write_text("class Cache:\n    pass\n\n\nclass DummyLayer:\n    pass\n")
    (tmp_path / "models" / "new" / "modeling_new.py").write_text(
        "class Last(\n    Middle,\n):\n    pass\n\n\nclass Middle(Mixin, Cache):\n    pass\n\n\n"
        "class DummyLayer(nn.Module):\n    pass\n\n\nclass Model(Cached):\n    pass\n"
    )
    (tmp_path / "models" / "new" / "modular_new.py").write_text("class Source(Cache):\n    pass\n")
    assert [c.name for c in found_classes(tmp_path)] == ["Cache", "Middle", "Last", "DummyLayer"]
    last = next(row for row in listed_classes(tmp_path) if row.name == "Last")
    assert not last.registered
    assert last.reason is not None
    assert "add a CachePytree entry for Last" in last.reason


def test_the_command_prints_a_table_and_json(listed) -> None:
    table = CliRunner().invoke(app, ["caches"], env={"COLUMNS": "160"})
    assert table.exit_code == 0
    assert all(name in table.stdout for name in listed)
    done = CliRunner().invoke(app, ["caches", "--json"])
    assert done.exit_code == 0
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows.keys() == listed.keys()
    assert rows["DynamicSlidingWindowLayer"]["leaves"] == ["cumulative_length", "keys", "values"]
    assert rows["QuantoQuantizedLayer"]["reason"] == WHY_NOT["QuantoQuantizedLayer"]
