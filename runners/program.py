"""A loaded program and its methods.

Methods loaded from one ``Program`` share their memory arenas, hence their mutable buffers: ``forward`` and ``decode``
see the same cache. (``portable_lib._load_for_executorch`` gives every method arenas of its own: a ``decode`` loaded
that way reads an empty cache.) So a method's outputs live in memory that the next call of any method overwrites.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from runners.clock import Clock, ClockedMethod
from runners.errors import UserError
from runners.package import Package
from runners.runtime import native_log, portable_lib, require_runtime
from runners.threads import holds_threads


class Method(Protocol):
    """A method of a loaded program, as ExecuTorch's Python binding gives it."""

    def call(self, inputs: Sequence[torch.Tensor], clone_outputs: bool = True) -> list[torch.Tensor]:
        """Run the method. With ``clone_outputs=False`` the outputs are valid until the next call of any method."""

    def set_inputs(self, inputs: Sequence[torch.Tensor]) -> None:
        """The first of the three parts of ``call``: the method will read these tensors, which must stay alive."""

    def execute(self) -> None:
        """The second one: run the method."""

    def get_outputs(self, clone_outputs: bool = True) -> list[torch.Tensor]:
        """The last one: the outputs, as ``call`` returns them.

        A method's outputs have one place in memory, whatever it is called with: what was returned with
        ``clone_outputs=False`` holds the outputs of later calls too, where those are of the same sizes.
        """


class Program:
    """A loaded program. It keeps the file open and the methods' memory alive."""

    def __init__(self, package: Package, clock: Clock | None = None) -> None:
        """Load a package's program.

        Args:
            package: an opened package.
            clock: adds up the time of all calls; None: nobody measures.

        Raises:
            UserError: the runtime lacks something, or the file does not load.
        """
        require_runtime(package.manifest)
        self.package = package
        with native_log() as log:
            try:
                # From the path, not from bytes: the runtime maps the file, and no buffer can be freed too early.
                self._handle = portable_lib._load_program(str(package.program_path))
                loaded = {name: self._handle.load_method(name) for name in package.manifest.methods}
            except RuntimeError as error:
                raise UserError(_load_message(package, error, log())) from error
        self._methods: dict[str, Method] = (
            loaded if clock is None else {name: ClockedMethod(method, clock) for name, method in loaded.items()}
        )
        holds_threads(self)

    def method(self, name: str) -> Method | None:
        """The method ``name``; None where the package has none of that name."""
        return self._methods.get(name)


def _load_message(package: Package, error: RuntimeError, log: str) -> str:
    built = package.manifest.versions.get("executorch", "of unknown version")
    reason = "; ".join(line for line in log.splitlines() if not line.startswith("[cpuinfo"))
    return (
        f"{package.program_path}: the runtime cannot load it: {error} ({reason or 'no further message'}). "
        f"It was built with executorch {built}: install that version, or build the package again."
    )
