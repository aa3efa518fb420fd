"""Compute the shape of a value once: not once a pass, and not once a layer.

A pass of executorch calls every operator of the program on fake tensors, which carry shape, dtype and strides but no
data. Most passes change little, so nearly all of these calls repeat those of the pass before; and in a model of equal
layers those of a layer repeat those of the layer before, on other tensors of the same shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from executorch.exir.lowered_backend_module import LoweredBackendModule
from executorch.exir.pass_base import NodeMetadata, ProxyValue, _ExportPassBase
from torch._export.pass_base import _ExportPassBaseDeprecatedDoNotUse as _TorchPassBase
from torch._higher_order_ops.executorch_call_delegate import executorch_call_delegate
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols
from torch.utils import _pytree as pytree

from pipeline.substitution import replaced

Memory = dict[object, tuple[object, list[object]]]
"""Operator and arguments -> result, and the objects whose ids are in the key: no other has these while they live."""

_TensorKey = Callable[[FakeTensor], object | None]
"""What stands for a fake tensor in a key; None: its id."""

_LITERALS = (bool, int, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Interpreter(Protocol):
    def call_function(self, target: object, args: object, kwargs: object) -> object: ...
    def output(self, target: object, args: object, kwargs: object) -> object: ...


@contextmanager
def remembered_values() -> Iterator[None]:
    """Within the scope a functional operator that a pass meets on the like of earlier values is not called again.

    An operator on fake tensors depends on nothing but what these tensors say of themselves, and passes do not change a
    value they were given, so the result may be shared. Fake tensors are compared by what they say, numbers and the like
    by type and value, everything else by identity; what a pass changed is computed anew. A result whose size only the
    data will tell has a symbol of its own for it: it is shared for the very same tensors alone, and not in torch's own
    passes, which ask for the symbols that a call has just made.

    A delegate is not run again to learn its outputs' shapes, which are in the node that calls it: each pass would
    interpret it whole, operator by operator.
    """
    memory: Memory = {}
    with (
        replaced(_ExportPassBase, "_fx", _with_memory(_ExportPassBase._fx, memory, shares_symbols=True)),
        replaced(_TorchPassBase, "_fx", _with_memory(_TorchPassBase._fx, memory, shares_symbols=False)),
    ):
        yield


def _with_memory(original: Callable[..., ProxyValue], memory: Memory, shares_symbols: bool) -> object:
    @functools.wraps(original)
    def with_memory(
        self: _ExportPassBase, kind: str, target: object, args: object, kwargs: object, meta: NodeMetadata
    ) -> ProxyValue:
        inner = self.interpreter
        if target is executorch_call_delegate:
            self.interpreter = _Delegates(inner, meta.data.get("val"))
        else:
            self.interpreter = _Remembering(inner, memory, self.tracer.fake_tensor_mode, shares_symbols)
        try:
            return original(self, kind, target, args, kwargs, meta)
        finally:
            self.interpreter = inner

    return with_memory


class _Remembering:
    """Stands in for a pass's interpreter while it computes one node, and remembers the result."""

    def __init__(self, inner: _Interpreter, memory: Memory, mode: FakeTensorMode, shares_symbols: bool) -> None:
        self.output = inner.output
        self._inner, self._memory, self._mode, self._shares_symbols = inner, memory, mode, shares_symbols

    def call_function(self, target: object, args: object, kwargs: object) -> object:
        operator = functional_operator(target)
        if operator is None:
            return self._inner.call_function(target, args, kwargs)
        key, known = self._key_of(operator, args, kwargs, _alike)
        if key in self._memory:
            return self._memory[key][0]
        own_key, own_known = self._key_of(operator, args, kwargs, _the_same)
        if self._shares_symbols and own_key in self._memory:
            return self._memory[own_key][0]
        result = self._inner.call_function(target, args, kwargs)
        if any(_depends_on_data(each) for each in pytree.tree_leaves(result)):
            key, known = own_key, own_known
        self._memory[key] = (result, known)
        return result

    def _key_of(
        self, operator: object, args: object, kwargs: object, tensor_key: _TensorKey
    ) -> tuple[object, list[object]]:
        """The key of a call, and the objects whose ids are in it."""
        known: list[object] = []
        parts = (_key(each, known, tensor_key) for each in (self._mode, args, kwargs))
        return (operator, *parts), known


class _Delegates:
    """The same while it computes a node that calls a delegate, whose outputs are known from an earlier pass."""

    def __init__(self, inner: _Interpreter, outputs: object) -> None:
        self._inner, self._outputs = inner, outputs

    def call_function(self, target: object, args: tuple[object, ...], kwargs: object) -> object:
        lowered, *inputs = args
        assert isinstance(lowered, LoweredBackendModule)
        made_for = [node.meta.get("val") for node in _inputs(lowered.original_module)]
        if self._outputs is None or [_shape(each) for each in made_for] != [_shape(each) for each in inputs]:
            return self._inner.call_function(target, args, kwargs)
        return self._outputs


def _shape(value: object) -> object:
    """What the shapes that a delegate gives can depend on; the data that a small constant brings along are no part."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(_expression(size) for size in value.shape)
    return _expression(value)


def _expression(size: object) -> object:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _inputs(program: ExportedProgram) -> list[Node]:
    """The placeholders that are arguments of a call, not weights."""
    names = set(program.graph_signature.user_inputs)
    return [node for node in program.graph.nodes if node.op == "placeholder" and node.name in names]


def _depends_on_data(value: object) -> bool:
    return isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)) and has_free_unbacked_symbols(
        value
    )


def functional_operator(target: object) -> object | None:
    """The operator behind ``target``, an edge operator or its original, or None if it writes one of its arguments."""
    operator = target._op if isinstance(target, EdgeOpOverload) else target
    if isinstance(operator, torch._ops.OpOverload):
        return None if operator._schema.is_mutable else operator
    return operator if getattr(operator, "__module__", None) in ("_operator", "math") else None


def _key(value: object, known: list[object], tensor_key: _TensorKey) -> object:
    """Equal for values that an operator cannot tell apart; an object that is told by its id is added to ``known``."""
    if isinstance(value, (list, tuple)):
        return (list, *(_key(item, known, tensor_key) for item in value))
    if isinstance(value, dict):
        return (dict, *((name, _key(item, known, tensor_key)) for name, item in value.items()))
    if isinstance(value, float):
        return (float, value.hex())  # tells -0.0 from 0.0
    if value is None or isinstance(value, _LITERALS):
        return (type(value), value)
    if isinstance(value, torch.SymInt):
        return (torch.SymInt, value.node.expr)
    key = tensor_key(value) if isinstance(value, FakeTensor) else None
    if key is not None:
        return key
    known.append(value)
    return (object, id(value))


def _the_same(_value: FakeTensor) -> object | None:
    return None


def _alike(value: FakeTensor) -> object | None:
    """All that a fake tensor says of itself; None where it holds data too."""
    if value.constant is not None or value.layout is not torch.strided:
        return None
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    return (
        type(value),
        id(value.fake_mode),  # one for the whole program
        isinstance(value, torch.nn.Parameter),
        value.dtype,
        value.fake_device,
        value.requires_grad,
        value.is_conj(),
        value.is_neg(),
        tuple(_expression(size) for size in sizes),
    )
