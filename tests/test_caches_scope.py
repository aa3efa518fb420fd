"""Cache classes as pytrees: the scope leaves no trace."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch.fx._pytree as fx_pytree
from torch.utils import _pytree as pytree
from transformers.cache_utils import DynamicCache, StaticCache

from pipeline.caches import (
    DeviceCache,
    registered,
)
from tests.cache_samples import (
    REGISTRIES,
    dynamic,
    foreign,
    nothing_changes,
    snapshot,
)


def test_inside_the_scope_a_cache_is_a_node_and_afterwards_a_leaf_again() -> None:
    cache = dynamic()
    with nothing_changes():
        with registered(DynamicCache):
            leaves = pytree.tree_leaves(cache)
        assert [leaf.shape for leaf in leaves] == [(1, 2, 3, 4)] * 4
        assert pytree.tree_leaves(cache) == [cache]


def test_without_an_argument_every_known_class_is_registered() -> None:
    with registered():
        assert {DynamicCache, StaticCache, DeviceCache} <= set(pytree.SUPPORTED_NODES)
        assert {DynamicCache, StaticCache, DeviceCache} <= set(fx_pytree.SUPPORTED_NODES)


def test_only_the_named_classes_are_registered() -> None:
    with registered(StaticCache):
        assert StaticCache in pytree.SUPPORTED_NODES
        assert DynamicCache not in pytree.SUPPORTED_NODES


def test_an_exception_leaves_the_registries_as_they_were() -> None:
    with nothing_changes(), pytest.raises(RuntimeError, match="inside"), registered():
        raise RuntimeError("inside")


def test_scopes_nest_and_the_inner_one_gives_back_the_outer_ones_nodes() -> None:
    cache = dynamic()
    with nothing_changes(), registered():
        with nothing_changes(), registered(DynamicCache):
            assert len(pytree.tree_leaves(cache)) == 4
        assert len(pytree.tree_leaves(cache)) == 4


def test_entering_the_scope_warns_of_nothing() -> None:
    with foreign(DynamicCache, "theirs.DynamicCache", with_fx=True), warnings.catch_warnings():
        warnings.simplefilter("error")
        with registered(), registered():
            pass


@pytest.mark.parametrize("name", ["theirs.DynamicCache", "pteline.DynamicCache", None])
@pytest.mark.parametrize("with_fx", [True, False])
def test_another_librarys_registration_is_put_back(name: str | None, with_fx: bool) -> None:
    cache = dynamic()
    with foreign(DynamicCache, name, with_fx=with_fx), nothing_changes():
        with registered():
            assert pytree.tree_structure(cache).context != "theirs"
            assert len(fx_pytree.tree_flatten_spec(cache, pytree.tree_structure(cache))) == 4
        assert pytree.tree_structure(cache).context == "theirs"


def test_another_librarys_registration_is_put_back_after_an_exception_in_a_nested_scope() -> None:
    with foreign(DynamicCache, "theirs.DynamicCache", with_fx=True), nothing_changes():
        with pytest.raises(KeyError), registered(), registered(DynamicCache):
            raise KeyError
        assert pytree.tree_structure(dynamic()).context == "theirs"


def test_transformers_own_registration_is_put_back() -> None:
    from transformers.integrations.executorch import register_dynamic_cache_export_support

    before = snapshot()
    try:
        register_dynamic_cache_export_support()
        with nothing_changes(), registered():
            assert len(pytree.tree_leaves(dynamic())) == 4
    finally:
        for registry, content in zip(REGISTRIES, before, strict=True):
            registry.clear()
            registry.update(content)


def test_importing_registers_nothing() -> None:
    code = (
        "import torch, transformers.cache_utils as c, torch.utils._pytree as p, torch.fx._pytree as f\n"
        "import pipeline.caches, pipeline.export\n"
        "classes = {x for x in vars(c).values() if isinstance(x, type) and issubclass(x, c.Cache)}\n"
        "classes.add(pipeline.caches.DeviceCache)\n"
        "print(len(classes), [x for x in classes for r in (p.SUPPORTED_NODES, f.SUPPORTED_NODES) if x in r])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    number, _, found = done.stdout.strip().partition(" ")
    assert int(number) > 3
    assert found == "[]"
