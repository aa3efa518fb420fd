"""``registered(...)``: cache classes are pytree nodes inside the scope, and the registries are as before after it.

Registering for the whole process changes how unrelated code treats a cache (it broke FSDP in transformers), so there is
no function that does that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.fx._pytree as fx_pytree
from torch.utils import _pytree as torch_pytree
from transformers.cache_utils import Cache

from pipeline.caches.proof import prove_round_trip
from pipeline.caches.pytree import CachePytree
from pipeline.caches.reasons import WHY_NOT
from runners.errors import UserError

_proved: set[CachePytree] = set()  # a round trip is proved once a process


@contextmanager
def scoped(entries: tuple[CachePytree, ...]) -> Iterator[None]:
    """Register ``entries`` for ``torch.utils._pytree`` and the fx spec until the scope ends, also by an exception.

    A registration that another library had made for the same class is set aside and put back. Scopes nest.

    Raises:
        UserError: two entries share a class or a name, or an entry does not survive a round trip.
    """
    _refuse_repeats(entries)
    for entry in entries:
        if entry not in _proved:
            prove_round_trip(entry)
            _proved.add(entry)
    with ExitStack() as stack:
        stack.enter_context(torch.serialization.safe_globals(_classes(entries)))
        for entry in entries:
            stack.enter_context(_one(entry))
        yield


def _classes(entries: tuple[CachePytree, ...]) -> list[Any]:
    """The classes that a saved program's example inputs may hold: ``torch.export.load`` reads them without a pickle."""
    return list({cls for entry in entries for cls in (entry.cls, *(row.cls for row in entry.layers))})


@contextmanager
def _one(entry: CachePytree) -> Iterator[None]:
    registries = _registries()
    keys: list[Any] = [entry.cls] * 4 + [entry.name]
    before = [registry.get(key, _MISSING) for registry, key in zip(registries, keys, strict=True)]
    for registry in registries[:4]:
        registry.pop(entry.cls, None)
    try:
        torch_pytree._private_register_pytree_node(
            entry.cls,
            entry.flatten,
            entry.unflatten,
            serialized_type_name=entry.name,
            flatten_with_keys_fn=entry.flatten_with_keys,
        )
        fx_pytree.register_pytree_flatten_spec(
            entry.cls,
            lambda cache, spec: entry.flatten(cache)[0],
            lambda cache, spec: len(entry.named_leaves(cache)) == spec.num_children,
        )
        yield
    finally:
        for registry, key, value in zip(registries, keys, before, strict=True):
            if value is _MISSING:
                registry.pop(key, None)
            else:
                registry[key] = value


_MISSING = object()


def _registries() -> list[dict[Any, Any]]:
    return [
        torch_pytree.SUPPORTED_NODES,
        torch_pytree.SUPPORTED_SERIALIZED_TYPES,
        fx_pytree.SUPPORTED_NODES,
        fx_pytree.SUPPORTED_NODES_EXACT_MATCH,
        torch_pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE,
    ]


def _refuse_repeats(entries: tuple[CachePytree, ...]) -> None:
    for what in ([e.cls.__name__ for e in entries], [e.name for e in entries]):
        repeated = sorted({x for x in what if what.count(x) > 1})
        if repeated:
            raise UserError(f"registered twice in one scope: {', '.join(repeated)}. Name each cache class once.")


def unknown_class(cls: type[Cache], known: tuple[CachePytree, ...]) -> UserError:
    """Return the error for a class without a registration: it shows the line to add."""
    if reason := WHY_NOT.get(cls.__name__):
        return UserError(f"{cls.__name__} has no pytree registration: {reason}")
    parent = next((e.cls.__name__ for e in known if issubclass(cls, e.cls)), None)
    if parent is None:
        names = ", ".join(e.cls.__name__ for e in known)
        return UserError(
            f"{cls.__name__} has no pytree registration. Known classes: {names}. Write one: "
            f'registered(CachePytree({cls.__name__}, "my.{cls.__name__}", layers=(...), sample=...)).'
        )
    return UserError(
        f"{cls.__name__} is a subclass of {parent}, and the exact type is the key: it may hold state that {parent}'s "
        f"registration would lose. If it adds none, register it yourself: "
        f"registered(subclass_of({parent}, {cls.__name__}))."
    )
