"""How one layer of a cache becomes leaves and a context, and comes back.

Legend: B batch, K key/value heads, S tokens of a call, L cache length, D head width.

A row names the attributes of a layer class that are tensors (the leaves, by path: ``keys``, ``conv_states.0``) and
those that are fixed at build time (the context). Python numbers that count tokens are leaves too: a graph that held
them would count no further than the step that was traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from pydantic import JsonValue
from torch._subclasses.fake_tensor import is_fake
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer

from runners.errors import UserError

Static = dict[str, JsonValue]
Layer: TypeAlias = CacheLayerMixin  # also DummyLayer and LinearAttentionLayer, which share no base with it
Path = tuple[str, int | None]  # an attribute, and the place in it where it is a table or a tuple
Hook = Callable[[Layer], None]
Step = Callable[[Cache, int], None]


def attention_step(cache: Cache, index: int) -> None:
    """Feed one token's keys and values ``[B, K, 1, D]`` to a layer that holds ``[B, K, L, D]``."""
    keys, values = cache.layers[index].keys, cache.layers[index].values
    cache.update(*(torch.zeros(t.shape[0], t.shape[1], 1, t.shape[3]) for t in (keys, values)), index)


@dataclass(frozen=True)
class LayerPytree:
    """One layer class as leaves (tensors that change) and context (JSON that does not).

    Args:
        cls: the exact class.
        leaves: attributes that are tensors, or Python numbers that count; in flattening order.
        static: attributes that are JSON values fixed at build time.
        tables: attributes that are ``dict[int, Tensor | None]``; the places that hold a tensor are leaves.
        tuples: attributes that are tuples of tensors; each is a leaf.
        optional: leaves that may be ``None`` in a layer that has no use for them.
        remade: tensors that ``derive`` makes again from static attributes, and that are no leaves therefore.
        fixed: attributes that must have one value, because with another the layer cannot be exported, and that value.
        settle: run before flattening; raises ``ValueError`` with the reason why the layer cannot be flattened now.
        derive: run after rebuilding; sets the attributes that follow from leaves and static attributes.
        step: decode steps that the proof of the round trip takes.
        traced: a subclass that a graph is traced with, where ``cls`` branches on a Python number that counts.
    """

    cls: type[Layer]
    leaves: tuple[str, ...]
    static: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    tuples: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    remade: tuple[str, ...] = ()
    fixed: tuple[tuple[str, JsonValue], ...] = ()
    settle: tuple[Hook, ...] = ()
    derive: tuple[Hook, ...] = ()
    step: tuple[Step, ...] = (attention_step,)
    traced: type[Layer] | None = None

    def named_leaves(self, layer: Layer, where: str) -> list[tuple[str, torch.Tensor]]:
        """Return ``("keys", tensor)`` for every leaf, in flattening order.

        Args:
            layer: of this class, or of the class that stands for it in a trace.
            where: the layer's place, for messages.

        Raises:
            UserError: it has no tensors yet, it holds a tensor that is no leaf, or a fixed attribute has another value.
        """
        self._ready(layer, where)
        refuse_lost_tensors(layer, (*self.leaves, *self.tables, *self.tuples, *self.remade), f"{where}.")
        return [(_name(path), _tensor(_value(layer, path))) for path in self._paths(layer)]

    def context(self, layer: Layer) -> Static:
        """Return what is fixed at build time, ready for JSON."""
        device = getattr(layer, "device", None)
        head: Static = {
            "type": self.cls.__name__,
            "device": None if device is None else str(device),
            "leaves": [_name(path) for path in self._paths(layer)],
        }
        return head | {name: getattr(layer, name) for name in self.static}

    def rebuild(self, leaves: Sequence[torch.Tensor], context: Mapping[str, JsonValue]) -> Layer:
        """Return a layer that holds exactly these tensors; its constructor, which would allocate, does not run."""
        layer = object.__new__(self.traced if self.traced is not None and _is_traced(leaves) else self.cls)
        for name in self.leaves:
            setattr(layer, name, None)
        for name in self.static:
            setattr(layer, name, context[name])
        for name, value in self.fixed:
            setattr(layer, name, value)
        for name in self.tables:
            setattr(layer, name, dict.fromkeys(range(cast(int, context["number_of_states"]))))
        for name in self.tuples:
            setattr(layer, name, ())
        for path, leaf in zip(leaf_names(context), leaves, strict=True):
            _put(layer, path, leaf)
        if context["device"] is not None:
            layer.device = torch.device(str(context["device"]))
        if issubclass(self.cls, CacheLayerMixin | DummyLayer):
            layer.is_initialized = True
        for derive in self.derive:
            derive(layer)
        return layer

    def _paths(self, layer: Layer) -> list[Path]:
        plain: list[Path] = [(name, None) for name in self.leaves if getattr(layer, name) is not None]
        tables: list[Path] = [
            (name, place)
            for name in self.tables
            for place, tensor in getattr(layer, name).items()
            if tensor is not None
        ]
        return plain + tables + [(name, place) for name in self.tuples for place in range(len(getattr(layer, name)))]

    def _ready(self, layer: Layer, where: str) -> None:
        name = f"{where} ({self.cls.__name__})"
        if not getattr(layer, "is_initialized", True):
            raise UserError(
                f"{name} has no tensors yet, so it has nothing to trace. Before exporting, call "
                "cache.early_initialization(...) (static) or use pipeline.caches.empty_dynamic_cache (dynamic), or run "
                "the model once and call pipeline.caches.rewind(cache)."
            )
        try:
            for settle in self.settle:
                settle(layer)
        except ValueError as problem:
            raise UserError(f"{name} {problem}") from None
        for attribute, value in self.fixed:
            if getattr(layer, attribute) != value:
                raise UserError(f"{name} has {attribute}={getattr(layer, attribute)}; only {value} can be exported.")
        for attribute in self.leaves:
            if getattr(layer, attribute) is None and attribute not in self.optional:
                raise UserError(f"{name} has no {attribute} yet. Run the model once and call pipeline.caches.rewind.")


def leaf_names(context: Mapping[str, JsonValue]) -> list[str]:
    """Return the names of a layer's leaves, in flattening order, from its context."""
    return cast(list[str], context["leaves"])


def combined(cls: type[Layer], *rows: LayerPytree, traced: type[Layer] | None = None) -> LayerPytree:
    """Return the row of a class that is all of these layers at once."""

    def joined(name: str) -> tuple[object, ...]:
        return tuple(dict.fromkeys(value for row in rows for value in getattr(row, name)))

    names = ("leaves", "static", "tables", "tuples", "optional", "remade", "fixed", "settle", "derive", "step")
    return LayerPytree(cls, traced=traced, **{name: joined(name) for name in names})  # type: ignore[arg-type]


def refuse_lost_tensors(owner: object, kept: Sequence[str], prefix: str) -> None:
    """Raise for a tensor attribute, or a container of tensors, that is not among the names that are kept."""
    for name, value in vars(owner).items():
        if name not in kept and _holds_tensor(value):
            raise UserError(
                f"{type(owner).__name__} holds the tensor {prefix}{name}, which its pytree entry does not name, so it "
                f'would be lost. Add "{name}" to the leaves of the entry.'
            )


def _holds_tensor(value: object) -> bool:
    if isinstance(value, dict):
        return any(_holds_tensor(v) for v in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_tensor(v) for v in value)
    return isinstance(value, torch.Tensor)


def _is_traced(leaves: Sequence[torch.Tensor]) -> bool:
    return torch.compiler.is_compiling() or any(is_fake(leaf) for leaf in leaves)


def _name(path: Path) -> str:
    return path[0] if path[1] is None else f"{path[0]}.{path[1]}"


def _value(layer: Layer, path: Path) -> torch.Tensor | int:
    whole = getattr(layer, path[0])
    return whole if path[1] is None else whole[path[1]]


def _tensor(value: torch.Tensor | int) -> torch.Tensor:
    """A number that counts becomes an int64 ``[]``."""
    return value if isinstance(value, torch.Tensor) else torch.tensor(value)


def _put(layer: Layer, path: str, leaf: torch.Tensor) -> None:
    name, _, place = path.partition(".")
    whole = getattr(layer, name)
    if not place:
        setattr(layer, name, leaf)
    elif isinstance(whole, dict):
        whole[int(place)] = leaf
    else:
        setattr(layer, name, (*whole, leaf))
