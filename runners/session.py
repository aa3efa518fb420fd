"""A session: one loaded program, the tokens in its cache, and calls that never write past the cache's end.

V vocabulary, n tokens of a call, L cache length, N tokens that the program chooses itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runners.choices import Choices, Row, chosen_tokens
from runners.clock import Clock
from runners.errors import UserError
from runners.manifest import Cache, CacheTensor, Method, TensorSpec
from runners.package import Package
from runners.program import Method as LoadedMethod
from runners.program import Program
from runners.threads import use_threads

# Tokens of a prompt that go into one call: with fewer the weights are read more often, with more attention needs more
# memory than the processor's caches have.
_PROMPT_CHUNK = 256


class ContextEndError(RuntimeError):
    """The cache is full: no further token can be fed. The last logits are still good for one more token of text."""


class Session:
    """A program that decodes one sequence at a time; of a program with B rows it uses one, and the next after a reset.

    Logits returned by a call are views of the program's memory: they are valid until the next call, and must be used
    or cloned before it. A program that chooses tokens itself (``top_k``) gives :class:`~runners.choices.Choices`.
    """

    def __init__(self, package: Package, program: Program) -> None:
        self.package = package
        self._program = program
        self._tokens: list[int] = []
        self._row = 0
        self._one_row: Row | None = None  # of a step, once it is known where ``decode`` leaves it
        self._bind()

    @classmethod
    def open(cls, package: Package, threads: int | None = None, clock: Clock | None = None) -> Session:
        """Load a package's program.

        Args:
            package: an opened package.
            threads: size of the runtime's thread pool; None: physical cores.
            clock: adds up the time of the program's calls; None: nobody measures.

        Raises:
            UserError: the package cannot decode text, the runtime lacks something, or the file does not load.
        """
        _forward_entry(package)
        use_threads(threads)
        return cls(package, Program(package, clock))

    @property
    def position(self) -> int:
        """Tokens in the cache: where the next token is written."""
        return len(self._tokens)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The ids in the cache."""
        return tuple(self._tokens)

    @property
    def max_length(self) -> int:
        """L: tokens the cache can hold."""
        return self._max_length

    @property
    def max_chunk(self) -> int:
        """Tokens that one call of :meth:`feed` takes at most."""
        return self._max_chunk

    @property
    def max_verify(self) -> int:
        """Tokens that one call of ``verify`` takes at most; 0 where the program has no such method."""
        entry = self.package.manifest.methods.get("verify")
        return entry.inputs[0].shape[1] if entry is not None else 0

    @property
    def rows(self) -> int:
        """B: sequences that a call of the program takes."""
        return self._rows

    @property
    def top_k(self) -> int | None:
        """N: likeliest tokens that the program gives; None: it gives the logits of all."""
        return self._top_k

    @property
    def vocabulary_size(self) -> int:
        """V: tokens that the model knows."""
        return self._vocabulary_size

    def feed_prompts_whole(self) -> None:
        """From now on feed a prompt in calls as long as the program takes, as ExecuTorch's own runner does."""
        self._max_chunk = self._longest_call

    def feed(self, ids: Sequence[int]) -> Row:
        """Append up to ``max_chunk`` tokens to the cache with one call of ``forward``.

        Returns:
            float32 [n, V], or [1, V] from a program that computes the last token's logits alone; or as many choices.
            Valid until the next call.

        Raises:
            UserError: an id lies outside the vocabulary, or the tokens do not fit into the cache.
        """
        assert 0 < len(ids) <= self.max_chunk, f"{len(ids)} tokens for one call, expected 1 to {self.max_chunk}"
        self._require_room(ids)
        logits = self._call(self._forward, torch.tensor([list(ids)], dtype=torch.int64))
        self._tokens.extend(ids)
        return logits

    def prefill(self, ids: Sequence[int]) -> Row:
        """Append any number of tokens that fits, in calls of at most ``max_chunk``.

        Returns:
            float32 [V]: logits after the last token; or the choices. Valid until the next call.

        Raises:
            UserError: ``ids`` is empty, holds an id outside the vocabulary, or does not fit. Nothing is written then.
        """
        if not ids:
            raise UserError("the prompt has no tokens: give some text.")
        self._require_room(ids)
        chunks = [ids[start : start + self.max_chunk] for start in range(0, len(ids), self.max_chunk)]
        for chunk in chunks[:-1]:
            self.feed(chunk)
        return self.feed(chunks[-1])[-1]

    def step(self, token: int) -> Row:
        """Append one token, with ``decode`` where the program has it.

        Returns:
            float32 [V]: logits after it; or the choices. Valid until the next call.

        Raises:
            ContextEndError: the cache is full.
        """
        if len(self._tokens) >= self._max_length:
            raise ContextEndError(f"the context of {self._max_length} tokens is full")
        self._one_value[0, 0] = token
        row = self._one_row
        if row is not None:
            self._run(self._decode, self._one)
        else:
            row = self._call(self._decode, self._one)[-1]
            if self._keeps_place:
                self._one_row = row
        self._tokens.append(token)
        return row

    def verify(self, ids: Sequence[int]) -> Row:
        """Append up to ``max_verify`` tokens with one call, and see what follows each: :meth:`rewind` takes back some.

        Returns:
            float32 [n, V]: logits after each token; or as many choices. Valid until the next call.

        Raises:
            UserError: an id lies outside the vocabulary, or the tokens do not fit into the cache.
        """
        assert self._verify is not None, "the program has no method verify"
        assert 0 < len(ids) <= self.max_verify, f"{len(ids)} tokens for one call, expected 1 to {self.max_verify}"
        self._require_room(ids)
        logits = self._call(self._verify, torch.tensor([list(ids)], dtype=torch.int64))
        self._tokens.extend(ids)
        return logits

    def reset(self) -> None:
        """Start a new sequence."""
        self.rewind(0)
        self._row = (self._row + 1) % self.rows

    def rewind(self, position: int) -> int:
        """Forget the tokens from ``position`` on, or more where the cache cannot go back that exactly.

        What was written beyond stays in memory, is never attended to, and is overwritten. A recurrent state cannot go
        back, nor can a sliding window whose older entries were overwritten: those start anew, at position 0, where the
        program itself makes a state zero.

        Returns:
            the position reached: ``position`` or 0.
        """
        assert 0 <= position <= self.position, f"cannot rewind from {self.position} to {position}"
        if position == self.position:
            return position
        reached = position if self._can_rewind() else 0
        del self._tokens[reached:]
        return reached

    def _bind(self) -> None:
        """Look up the methods and sizes, and allocate what the session itself holds.

        What a step needs is made here, once: beside a short step, a tensor made anew costs.
        """
        entry = _forward_entry(self.package)
        self._rows, self._longest_call = entry.inputs[0].shape[:2]
        self._max_chunk = min(self._longest_call, _PROMPT_CHUNK)
        self._top_k = chosen_tokens(entry)
        self._vocabulary_size = _vocabulary_size(self.package, entry)
        self._max_length = _cache_entry(self.package).max_length
        forward = self._program.method(_main_method(self.package))
        assert forward is not None
        self._forward: LoadedMethod = forward
        self._decode: LoadedMethod = self._program.method("decode") or forward
        self._verify: LoadedMethod | None = self._program.method("verify")
        self._one, self._position = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        self._one_value, self._position_value = self._one.numpy(), self._position.numpy()  # the same memory
        self._cache = tuple(_zeros(spec) for spec in entry.inputs[2:])  # empty where the program holds the cache
        self._keeps_place = self._rows == 1 and not self._cache  # of a step's row: a method's outputs have one place

    def _call(self, method: LoadedMethod, tokens: torch.Tensor) -> Row:
        """Run a method on int64 [1, n] at the current position; float32 [n or 1, V], or as many choices."""
        self._run(method, tokens)
        outputs = method.get_outputs(clone_outputs=False)
        own = len(outputs) - len(self._cache)
        # Copied, not kept: the program's outputs lie where its next call computes.
        for kept, new in zip(self._cache, outputs[own:], strict=True):
            kept.copy_(new)
        return self._row_of(outputs[:own])

    def _run(self, method: LoadedMethod, tokens: torch.Tensor) -> None:
        """Run a method on int64 [1, n] at the current position, and leave its outputs where they are."""
        inputs = (*self._at_position(tokens), *self._cache)  # by name: the method reads them, and keeps none alive
        method.set_inputs(inputs)
        method.execute()

    def _row_of(self, outputs: Sequence[torch.Tensor]) -> Row:
        """What the program says of the row in use."""
        logits = outputs[0][self._row]
        if self._top_k is None:
            return logits.reshape(-1, self._vocabulary_size)
        return Choices(logits.reshape(-1, self._top_k), outputs[1][self._row].reshape(-1, self._top_k))

    def _at_position(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens and the position of a call. Rows that are not in use are fed at the cache's last position."""
        if self._rows == 1:
            self._position_value[0] = len(self._tokens)
            return tokens, self._position
        count = tokens.shape[1]
        all_tokens = torch.zeros(self._rows, count, dtype=torch.int64)
        positions = torch.full((self._rows, count), self._max_length - 1)
        all_tokens[self._row] = tokens[0]
        positions[self._row] = torch.arange(self.position, self.position + count)
        return all_tokens, positions

    def _require_room(self, ids: Sequence[int]) -> None:
        room = self.max_length - self.position
        if len(ids) > room:
            used = f", {self.position} of them used" if self.position else ""
            raise UserError(
                f"the prompt has {len(ids)} tokens, but the context of '{self.package.manifest.name}' holds "
                f"{self.max_length}{used}. Shorten the prompt, or build with a larger cache.max_length."
            )
        strange = next((token for token in ids if not 0 <= token < self.vocabulary_size), None)
        if strange is not None:
            raise UserError(f"token id {strange} lies outside the model's vocabulary of {self.vocabulary_size}.")

    def _can_rewind(self) -> bool:
        windows = [_window(tensor, self._attention()) for tensor in self._tensors("sliding")]
        return not self._is_recurrent() and all(self.position <= window for window in windows)

    def _is_recurrent(self) -> bool:
        return bool(self._tensors("conv") or self._tensors("recurrent"))

    def _tensors(self, kind: str) -> list[CacheTensor]:
        return [tensor for tensor in _cache_entry(self.package).tensors if tensor.kind == kind]

    def _attention(self) -> str:
        return _cache_entry(self.package).attention


def _main_method(package: Package) -> str:
    """The method that reads tokens; of a program with images, it reads what another method makes of them."""
    return "text_decoder" if "text_decoder" in package.manifest.methods else "forward"


def _forward_entry(package: Package) -> Method:
    entry = package.manifest.methods.get(_main_method(package))
    if entry is None or package.manifest.cache is None or len(entry.inputs) < 2:
        found = ", ".join(package.manifest.methods) or "no method"
        raise UserError(
            f"package '{package.manifest.name}' (task {package.manifest.model.task}) cannot generate text: that takes "
            f"a method forward(tokens, position) and a cache; the package has {found}."
        )
    return entry


def _vocabulary_size(package: Package, entry: Method) -> int:
    if chosen_tokens(entry) is None:
        return entry.outputs[0].shape[-1]
    assert package.manifest.model.vocabulary_size is not None, "a model that continues text has a vocabulary"
    return package.manifest.model.vocabulary_size


def _cache_entry(package: Package) -> Cache:
    assert package.manifest.cache is not None, "checked when the session was opened"
    return package.manifest.cache


def _zeros(spec: TensorSpec) -> torch.Tensor:
    return torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))


def _window(tensor: CacheTensor, attention: str) -> int:
    """Positions a sliding tensor keeps: [K, W, 1, D] with custom attention, else [B, K, W, D]."""
    return tensor.shape[1] if attention == "custom" else tensor.shape[2]
