"""Do the arithmetic of dynamic sizes once for equal operands.

Each fake tensor with a dynamic axis multiplies, adds and compares its sizes to find out how it lies in memory, some
twenty operations on symbols each. A model of equal layers has a few hundred different ones among a hundred thousand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from torch._logging import _internal as logging_of_torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from pipeline.substitution import replaced

# Those whose result follows from the two expressions alone. (That of ``mod`` depends on what is known of their range.)
METHODS = ("mul", "add", "sub", "eq", "ne", "ge", "gt", "le", "lt", "sym_max", "sym_min")
_PLAIN = (int, float, bool, type(None))  # a hint of another type is a symbol itself

_Operation = Callable[[SymNode, SymNode], SymNode]
_Memory = dict[object, tuple[object, type, object, bool, ShapeEnv]]
"""Operation and operands -> expression, type, example value and form of the result, and the environment whose id is in
the key: no other has it while this one lives."""


@contextmanager
def remembered_sizes() -> Iterator[None]:
    """Within the scope an operation on equal expressions gives an equal result, a new object each time, from memory.

    While a tracer records, its operations are its own: it is told of each.
    """
    memory: _Memory = {}
    with ExitStack() as stack:
        for method in METHODS:
            operation = _remembering(getattr(SymNode, f"_{method}"), method, memory)
            stack.enter_context(replaced(SymNode, f"_{method}", operation))
        yield


def _remembering(original: _Operation, method: str, memory: _Memory) -> _Operation:
    def operation(self: SymNode, other: SymNode) -> SymNode:
        if not _is_plain(self) or not _is_plain(other) or get_proxy_mode() is not None:
            return original(self, other)
        # The counter tells when the environment learns that a symbol stands for another expression.
        key = (method, id(self.shape_env), self.shape_env._replacements_version_counter, *_key(self), *_key(other))
        found = memory.get(key)
        if found is not None:
            expression, kind, hint, is_summation, _ = found
            return SymNode(expression, self.shape_env, kind, hint, optimized_summation=is_summation)
        result = original(self, other)
        if result._hint is not None:  # without an example value a new node would look for one
            memory[key] = result._expr, result.pytype, result._hint, result._optimized_summation, self.shape_env
        return result

    return operation


def _is_plain(node: SymNode) -> bool:
    return (
        type(node) is SymNode
        and type(node._hint) in _PLAIN
        and node.shape_env is not None
        and not node.shape_env._translation_validation_enabled
        and not logging_of_torch.GET_DTRACE_STRUCTURED
    )


def _key(node: SymNode) -> tuple[object, ...]:
    return node._expr, node.pytype, node._hint, node._optimized_summation
