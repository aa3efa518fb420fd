"""The proof that a registration loses nothing of a cache and keeps nothing in the context that changes."""

from __future__ import annotations

import json

import torch
from transformers.cache_utils import Cache

from pipeline.caches.pytree import CachePytree, Context
from runners.errors import UserError


def prove_round_trip(entry: CachePytree) -> None:
    """Flatten and rebuild a sample, then decode one step: same type, layers, tensors (identity), attributes and spec.

    Numbers that count are tensors of their own at each flattening: of these the value must be the same.

    Raises:
        UserError: a leaf or an attribute is lost or changed, or the context changes while decoding.
    """
    cache = entry.sample()
    _require(type(cache) is entry.cls, entry, f"its sample is a {type(cache).__name__}")
    leaves, context = entry.flatten(cache)
    _require(_is_json(context), entry, f"the context {context} is not JSON, which a saved program needs")
    rebuilt = entry.unflatten(leaves, context)
    _require(type(rebuilt) is entry.cls, entry, "the rebuilt cache has another type")
    pairs = list(zip(entry.parts(cache), entry.parts(rebuilt), strict=True))
    _require(all(type(a) is type(b) for a, b in pairs), entry, "the layers' types changed")
    again, context_again = _flattened(entry, rebuilt)
    same = all(a is b or (a.ndim == 0 and a.equal(b)) for a, b in zip(leaves, again, strict=True))
    _require(same, entry, "a leaf is not the tensor that went in")
    _require(context == context_again, entry, "the context changed")
    for before, after in pairs:
        lost = _attributes(before) - _attributes(after)
        _require(not lost, entry, f"{type(before).__name__} lost the attributes {sorted(lost)}")
        changed = [name for name, value in _plain(before).items() if getattr(after, name) != value]
        _require(not changed, entry, f"{type(before).__name__} changed the attributes {sorted(changed)}")
    entry.step(rebuilt)
    _require(
        entry.flatten(rebuilt)[1] == context, entry, "a decode step changed the context: make that value a tensor leaf"
    )


def _flattened(entry: CachePytree, rebuilt: Cache) -> tuple[list[torch.Tensor], Context]:
    try:
        return entry.flatten(rebuilt)
    except AttributeError as missing:
        raise UserError(
            f"the pytree registration of {entry.cls.__name__} does not survive a round trip: a rebuilt {missing}. Add "
            f'"{missing.name}" to the static attributes of its row, or set it in a derive hook.'
        ) from None


def _is_json(context: Context) -> bool:
    """Whether the context is read back from JSON as it was written: a tuple, for one, comes back as a list."""
    try:
        return bool(json.loads(json.dumps(context)) == context)
    except TypeError:
        return False


def _attributes(thing: object) -> set[str]:
    return {name for name, value in vars(thing).items() if value is not None}


def _plain(thing: object) -> dict[str, bool | int | str]:
    return {name: value for name, value in vars(thing).items() if isinstance(value, bool | int | str)}


def _require(condition: bool, entry: CachePytree, problem: str) -> None:
    if not condition:
        raise UserError(f"the pytree registration of {entry.cls.__name__} does not survive a round trip: {problem}.")
