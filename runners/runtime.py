"""ExecuTorch's runtime: the one module that imports it, and what a package needs of it.

Importing it takes seconds and logs lines about optional CUDA libraries, which are kept from the terminal here. Kernel
libraries register with the runtime when they are imported, and need ``portable_lib`` to be imported before them.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO

from runners.errors import UserError
from runners.manifest import Manifest

_log_level = logging.root.manager.disable
logging.disable(logging.WARNING)
try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from executorch.extension.pybindings import portable_lib
finally:
    logging.disable(_log_level)

KERNEL_LIBRARIES = {  # operator namespace -> module that registers its kernels
    "llama": "executorch.extension.llm.custom_ops.custom_ops",
    "quantized_decomposed": "executorch.kernels.quantized",
}

__all__ = ["KERNEL_LIBRARIES", "native_log", "portable_lib", "require_runtime"]


def require_runtime(manifest: Manifest) -> None:
    """Import the kernel libraries that a package names, and check that every backend and operator is there.

    Raises:
        UserError: names each backend and operator that this runtime lacks.
    """
    _import_kernels(_missing_operators(manifest))
    registered = portable_lib._get_registered_backend_names()
    backends = [name for name in manifest.backends if name not in registered]
    operators = _missing_operators(manifest)
    if not backends and not operators:
        return
    lacking = [f"backend {name}" for name in backends] + [f"operator {name}" for name in operators]
    raise UserError(
        f"package '{manifest.name}': this ExecuTorch runtime lacks {', '.join(lacking)}. It has the backends "
        f"{', '.join(sorted(registered))}. The package was built with executorch "
        f"{manifest.versions.get('executorch', 'of unknown version')}: install that version, or build for this one."
    )


def _missing_operators(manifest: Manifest) -> list[str]:
    registered = set(portable_lib._get_operator_names())
    return [name for name in manifest.operators if name not in registered]


def _import_kernels(missing: list[str]) -> None:
    namespaces = {name.split("::")[0] for name in missing}
    for namespace in sorted(namespaces & KERNEL_LIBRARIES.keys()):
        try:
            importlib.import_module(KERNEL_LIBRARIES[namespace])
        except (ImportError, OSError) as error:
            raise UserError(
                f"the kernels of {namespace}:: could not be loaded from {KERNEL_LIBRARIES[namespace]} ({error}). "
                "Install the executorch wheel for this platform."
            ) from error


@contextmanager
def native_log() -> Iterator[Callable[[], str]]:
    """Keep what native code writes to standard error; the yielded function returns it.

    The runtime's error codes say little: the reason is in these lines. When all goes well they are noise. The binding
    writes some of them through ``sys.stderr``, the libraries below it write to the file descriptor.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as log, redirect_stderr(StringIO()) as python_log:
        os.dup2(log.fileno(), 2)
        try:
            yield lambda: python_log.getvalue() + _text_of(log.fileno())
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def _text_of(descriptor: int) -> str:
    return os.pread(descriptor, 1 << 16, 0).decode("utf-8", errors="replace")
