"""Compile a graph to Python when it is called, not each time it has been changed.

Each pass compiles the graph that it leaves behind, a function of one line a node, and again each graph that it copies.
Passes read nodes, and nearly none of these functions is ever called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx import GraphModule
from torch.fx.graph import _PyTreeCodeGen

from pipeline.substitution import replaced

_compile = GraphModule.recompile


@contextmanager
def compiled_when_called() -> Iterator[None]:
    """A ``GraphModule`` that was changed in the scope is compiled, there or later, when it is called, read or pickled.

    Within, as text it is its class alone: executorch makes a text of whole graphs for a log that nobody reads.
    """
    with replaced(GraphModule, "recompile", _compile_later), replaced(GraphModule, "__str__", _short_text):
        yield


class _CompiledWhenRead:
    """Stands on a module's class, of which that module is the only one, for what compiling makes."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, module: GraphModule | None, owner: type) -> object:
        if module is None:
            return self
        _compile(module)  # puts the compiled one in the place of this, or before it
        return getattr(module, self._name)


class _CodeWhenRead:
    """Stands for what ``recompile`` returns, which is only read to pickle the module."""

    def __init__(self, module: GraphModule) -> None:
        self._module = module

    @property
    def globals(self) -> dict[str, object]:
        found: dict[str, object] = _compile(self._module).globals
        return found


def _compile_later(self: GraphModule) -> _CodeWhenRead:
    if isinstance(self._graph._codegen, _PyTreeCodeGen):
        self._in_spec = self._graph._codegen.pytree_info.in_spec
        self._out_spec = self._graph._codegen.pytree_info.out_spec
    cls = type(self)
    cls.forward, cls._code = _CompiledWhenRead("forward"), _CompiledWhenRead("_code")
    cls.__reduce__ = _reduced  # type: ignore[assignment]  # a method once it is on the class
    vars(self).pop("_code", None)  # of the graph as it was
    return _CodeWhenRead(self)


def _reduced(self: GraphModule) -> object:
    """As the class says, which takes the code from the module's attributes."""
    _compile(self)
    return super(type(self), self).__reduce__()


def _short_text(self: GraphModule) -> str:
    return f"<{type(self).__name__}>"
