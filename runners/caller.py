"""Calls of a program that keeps nothing between them: inputs by name, held against the manifest."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from runners.errors import UserError
from runners.manifest import TaskName, TensorSpec
from runners.package import Package
from runners.program import Program
from runners.threads import use_threads

TASKS: tuple[TaskName, ...] = ("fill-mask", "embedding", "image-classification")  # those without a cache
TOKENS, MASK, PIXELS = "tokens", "attention_mask", "pixels"
HIDDEN, LOGITS = "hidden", "logits"


class Caller:
    """A loaded program without a cache."""

    def __init__(self, package: Package, program: Program) -> None:
        self.package = package
        self._program = program

    @classmethod
    def open(cls, package: Package, threads: int | None = None) -> Caller:
        """Load a package's program.

        Args:
            package: an opened package.
            threads: size of the runtime's thread pool; None: physical cores.

        Raises:
            UserError: the program has a cache, the runtime lacks something, or the file does not load.
        """
        if package.manifest.cache is not None or "forward" not in package.manifest.methods:
            raise UserError(
                f"package '{package.manifest.name}' (task {package.manifest.model.task}) has no method forward that "
                f"works without a cache; expected a package for {', '.join(TASKS)}."
            )
        use_threads(threads)
        return cls(package, Program(package))

    def call(self, inputs: Mapping[str, torch.Tensor], method: str = "forward") -> dict[str, torch.Tensor]:
        """Run a method.

        Args:
            inputs: by name, as the manifest lists them, in any order.
            method: its name.

        Returns:
            the outputs by name; they stay valid.

        Raises:
            UserError: the method is missing, or an input is missing, unknown, of another dtype or size, or holds a
                token outside the vocabulary.
        """
        entry, loaded = self.package.manifest.methods.get(method), self._program.method(method)
        if entry is None or loaded is None:
            raise UserError(f"package '{self.package.manifest.name}' has no method {method}.")
        names = [spec.name for spec in entry.inputs]
        if set(names) != set(inputs):
            raise UserError(f"method {method} takes {', '.join(names)}; given are {', '.join(inputs)}.")
        for spec in entry.inputs:
            require_fit(spec, inputs[spec.name])
        self._require_known(inputs.get(TOKENS))
        outputs = loaded.call(tuple(inputs[name] for name in names))
        return {spec.name: output for spec, output in zip(entry.outputs, outputs, strict=True)}

    def _require_known(self, tokens: torch.Tensor | None) -> None:
        size = self.package.manifest.model.vocabulary_size
        if tokens is None or size is None:
            return
        strange = tokens[(tokens < 0) | (tokens >= size)]
        if strange.numel():
            raise UserError(f"token id {int(strange[0])} lies outside the model's vocabulary of {size}.")


def text_inputs(ids: list[int]) -> dict[str, torch.Tensor]:
    """The inputs of one text without padding: ``tokens`` and ``attention_mask``, int64 ``[1, S]``."""
    return {TOKENS: torch.tensor([ids], dtype=torch.int64), MASK: torch.ones(1, len(ids), dtype=torch.int64)}


def max_tokens(package: Package) -> int:
    """Tokens that a call takes at most.

    Raises:
        UserError: the program takes no tokens.
    """
    entry = package.manifest.methods.get("forward")
    spec = next((spec for spec in entry.inputs if spec.name == TOKENS), None) if entry is not None else None
    if spec is None:
        raise UserError(
            f"package '{package.manifest.name}' (task {package.manifest.model.task}) takes no text: its method forward "
            f"has no input {TOKENS}."
        )
    return spec.shape[1]


def require_fit(spec: TensorSpec, tensor: torch.Tensor) -> None:
    """Hold an input against the manifest.

    Raises:
        UserError: it has another dtype or size than the program takes.
    """
    sizes = list(tensor.shape)
    rows = zip(spec.min_shape, sizes, spec.shape, strict=False)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if len(sizes) == len(spec.shape) and all(low <= size <= high for low, size, high in rows) and dtype == spec.dtype:
        return
    bounds = [high if low == high else f"{low} to {high}" for low, high in zip(spec.min_shape, spec.shape, strict=True)]
    wanted = ", ".join(map(str, bounds))
    raise UserError(f"input {spec.name} is {dtype} {sizes}; the program takes {spec.dtype} [{wanted}].")
