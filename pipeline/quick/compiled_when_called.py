"""Compile a graph to Python when it is called, not each time it has been changed.

Each pass compiles the graph that it leaves behind, a function of one line a node, and again each graph that it copies.
Passes read nodes, and nearly none of these functions is ever called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx import GraphModule
from torch.fx.graph import _PyTreeCodeGen

from pipeline.quick.substitution import replaced

_compile = GraphModule.recompile
_code = GraphModule.code.fget


@contextmanager
def compiled_when_called() -> Iterator[None]:
    """Within the scope a ``GraphModule`` that was changed is compiled when its ``forward`` or its code is read.

    As text it is its class alone: executorch makes a text of whole graphs for a log that nobody reads.
    """
    with (
        replaced(GraphModule, "recompile", _compile_later),
        replaced(GraphModule, "code", property(_compiled_code)),
        replaced(GraphModule, "__str__", _short_text),
    ):
        yield


class _CompiledWhenRead:
    """Stands for the ``forward`` of a module's class, of which that module is the only one."""

    def __get__(self, module: GraphModule | None, owner: type) -> object:
        if module is None:
            return self
        _compile(module)  # puts the compiled one in the place of this
        return module.forward


def _compile_later(self: GraphModule) -> None:
    if isinstance(self._graph._codegen, _PyTreeCodeGen):
        self._in_spec = self._graph._codegen.pytree_info.in_spec
        self._out_spec = self._graph._codegen.pytree_info.out_spec
    type(self).forward = _CompiledWhenRead()


def _compiled_code(self: GraphModule) -> object:
    if isinstance(type(self).forward, _CompiledWhenRead):
        _compile(self)
    return _code(self)


def _short_text(self: GraphModule) -> str:
    return f"<{type(self).__name__}>"
