"""Compute the shape of a value once, not once a pass.

A pass of executorch calls every operator of the program on fake tensors, which carry shape, dtype and strides but no
data. Most passes change little, so nearly all of these calls repeat those of the pass before, on the very same tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from executorch.exir.pass_base import NodeMetadata, ProxyValue, _ExportPassBase
from torch._export.pass_base import _ExportPassBaseDeprecatedDoNotUse as _TorchPassBase
from torch._subclasses import FakeTensorMode

from pipeline.substitution import replaced

Memory = dict[object, tuple[object, list[object]]]
"""Operator and arguments -> result, and the objects whose ids are in the key: no other has these while they live."""

_LITERALS = (bool, int, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Interpreter(Protocol):
    def call_function(self, target: object, args: object, kwargs: object) -> object: ...
    def output(self, target: object, args: object, kwargs: object) -> object: ...


@contextmanager
def remembered_values() -> Iterator[None]:
    """Within the scope a functional operator that a pass meets on the very same values is not called a second time.

    An operator on fake tensors depends on nothing but its arguments, and passes do not change a value they were given,
    so the result may be shared. Values are compared by identity, numbers and the like by type and value; what a pass
    changed is computed anew.
    """
    memory: Memory = {}
    with (
        replaced(_ExportPassBase, "_fx", _with_memory(_ExportPassBase._fx, memory, _Remembering)),
        replaced(_TorchPassBase, "_fx", _with_memory(_TorchPassBase._fx, memory, _Recording)),
    ):
        yield


def _with_memory(original: Callable[..., ProxyValue], memory: Memory, wrapper: type[_Recording]) -> object:
    @functools.wraps(original)
    def with_memory(
        self: _ExportPassBase, kind: str, target: object, args: object, kwargs: object, meta: NodeMetadata
    ) -> ProxyValue:
        inner = self.interpreter
        self.interpreter = wrapper(inner, memory, self.tracer.fake_tensor_mode)
        try:
            return original(self, kind, target, args, kwargs, meta)
        finally:
            self.interpreter = inner

    return with_memory


class _Recording:
    """Stands in for a pass's interpreter while it computes one node, and remembers the result.

    It serves torch's own passes: these ask which symbols a call has just made, so each call must be a real one.
    """

    def __init__(self, inner: _Interpreter, memory: Memory, mode: FakeTensorMode) -> None:
        self.output = inner.output
        self._inner, self._memory, self._mode = inner, memory, mode

    def call_function(self, target: object, args: object, kwargs: object) -> object:
        operator = functional_operator(target)
        if operator is None:
            return self._inner.call_function(target, args, kwargs)
        known: list[object] = []
        key = (operator, _key(self._mode, known), _key(args, known), _key(kwargs, known))
        if not self._may_recall(key):
            self._memory[key] = (self._inner.call_function(target, args, kwargs), known)
        return self._memory[key][0]

    def _may_recall(self, key: object) -> bool:
        return False


class _Remembering(_Recording):
    """The same, and what is remembered is not computed again."""

    def _may_recall(self, key: object) -> bool:
        return key in self._memory


def functional_operator(target: object) -> object | None:
    """The operator behind ``target``, an edge operator or its original, or None if it writes one of its arguments."""
    operator = target._op if isinstance(target, EdgeOpOverload) else target
    if isinstance(operator, torch._ops.OpOverload):
        return None if operator._schema.is_mutable else operator
    return operator if getattr(operator, "__module__", None) in ("_operator", "math") else None


def _key(value: object, known: list[object]) -> object:
    """Equal for equal literals, and otherwise only for the same object, which is then added to ``known``."""
    if isinstance(value, (list, tuple)):
        return (list, *(_key(item, known) for item in value))
    if isinstance(value, dict):
        return (dict, *((name, _key(item, known)) for name, item in value.items()))
    if isinstance(value, float):
        return (float, value.hex())  # tells -0.0 from 0.0
    if value is None or isinstance(value, _LITERALS):
        return (type(value), value)
    known.append(value)
    return (object, id(value))
