"""A session of an encoder-decoder program: ``encode`` an input once, then decode answers to it.

V vocabulary, n tokens of a call, L cache length, E most positions of the encoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from runners.caller import require_fit
from runners.errors import UserError
from runners.manifest import Decoding, Method, TaskName
from runners.multimodal import open_text_session
from runners.package import Package
from runners.program import Method as LoadedMethod
from runners.program import Program
from runners.session import ContextEndError, Session
from runners.threads import use_threads

TASKS: tuple[TaskName, ...] = ("speech-to-text", "text2text")  # those with an encoder and a decoder
TOKENS, POSITION, MASK = "tokens", "position", "encoder_mask"
SUPPRESSED = -1e9  # logit of a token that is not to be chosen; finite, so that figures over all logits stay finite


class Seq2SeqSession:
    """A program that encodes one input and decodes one answer to it at a time.

    Tokens that the model is never to write (``Decoding``) have the logit ``SUPPRESSED`` in what a call returns.
    """

    def __init__(self, package: Package, program: Program) -> None:
        self.package = package
        self._encode, self._decode = (_loaded(program, name) for name in ("encode", "decode"))
        self._mask = torch.zeros(1, self._positions(), dtype=torch.int64)
        self._position = torch.zeros(1, dtype=torch.int64)
        self._fed = 0

    @classmethod
    def open(cls, package: Package, threads: int | None = None) -> Seq2SeqSession:
        """Load a package's program.

        Args:
            package: an opened package.
            threads: size of the runtime's thread pool; None: physical cores.

        Raises:
            UserError: the package has no encoder and decoder, the runtime lacks something, or the file does not load.
        """
        manifest = package.manifest
        if manifest.cache is None or manifest.decoding is None or not {"encode", "decode"} <= set(manifest.methods):
            found = ", ".join(manifest.methods) or "no method"
            raise UserError(
                f"package '{manifest.name}' (task {manifest.model.task}) is of no encoder-decoder model: one has "
                f"the methods encode and decode, and a cache; the package has {found}."
            )
        use_threads(threads)
        return cls(package, Program(package))

    @property
    def position(self) -> int:
        """Tokens in the decoder's cache: where the next token is written."""
        return self._fed

    @property
    def max_length(self) -> int:
        """L: tokens that the decoder's cache can hold."""
        assert self.package.manifest.cache is not None
        return self.package.manifest.cache.max_length

    @property
    def max_chunk(self) -> int:
        """Tokens that one call of ``decode`` takes at most."""
        return next(spec.shape[1] for spec in self._entry("decode").inputs if spec.name == TOKENS)

    @property
    def vocabulary_size(self) -> int:
        """V: logits a token."""
        return self._entry("decode").outputs[0].shape[-1]

    @property
    def decoding(self) -> Decoding:
        """How answers begin, and what they never hold."""
        assert self.package.manifest.decoding is not None
        return self.package.manifest.decoding

    def encode(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Read an input, in the place of an earlier one. The decoder begins anew.

        Args:
            inputs: of the method ``encode``, by name.

        Raises:
            UserError: an input is missing or unknown, or it has another dtype or size than the program takes.
        """
        entry = self._entry("encode")
        names = [spec.name for spec in entry.inputs]
        if set(names) != set(inputs):
            raise UserError(f"method encode takes {', '.join(names)}; given are {', '.join(inputs)}.")
        for spec in entry.inputs:
            require_fit(spec, inputs[spec.name])
        hidden = self._encode.call(tuple(inputs[name] for name in names), clone_outputs=False)[0]
        self._mask.zero_()
        self._mask[:, : hidden.shape[1]] = 1
        self.reset()

    def prefill(self, ids: Sequence[int]) -> torch.Tensor:
        """Append any number of tokens that fits, in calls of at most ``max_chunk``.

        Returns:
            float32 [V]: logits of the first token of an answer that they begin. Valid until the next call.

        Raises:
            UserError: nothing was encoded, or ``ids`` is empty, holds an id outside the vocabulary, or does not fit.
        """
        self._require_room(ids)
        for start in range(0, len(ids), self.max_chunk):
            chunk = torch.tensor([list(ids[start : start + self.max_chunk])], dtype=torch.int64)
            logits = self._call(chunk)
        return suppress(logits, self.decoding, first=True)

    def step(self, token: int) -> torch.Tensor:
        """Append one token.

        Returns:
            float32 [V]: logits after it. Valid until the next call.

        Raises:
            ContextEndError: the cache is full.
        """
        if self.position >= self.max_length:
            raise ContextEndError(f"the context of {self.max_length} tokens is full")
        return suppress(self._call(torch.tensor([[token]], dtype=torch.int64)), self.decoding, first=False)

    def reset(self) -> None:
        """Begin another answer to the same input."""
        self._fed = 0

    def _call(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run ``decode`` on int64 [1, n] at the current position; the last token's logits, float32 [V]."""
        self._position.fill_(self._fed)
        given = {TOKENS: tokens, POSITION: self._position, MASK: self._mask}
        inputs = tuple(given[spec.name] for spec in self._entry("decode").inputs)
        logits: torch.Tensor = self._decode.call(inputs, clone_outputs=False)[0]
        self._fed += tokens.shape[1]
        return logits[0, -1]

    def _require_room(self, ids: Sequence[int]) -> None:
        if not self._mask.any():
            raise UserError("nothing was encoded yet: give an input before the first token.")
        if not 0 < len(ids) <= self.max_length - self._fed:
            raise UserError(
                f"{len(ids)} tokens do not fit: the decoder of '{self.package.manifest.name}' holds {self.max_length}, "
                f"{self._fed} of them used. Give 1 to {self.max_length - self._fed}."
            )
        strange = next((token for token in ids if not 0 <= token < self.vocabulary_size), None)
        if strange is not None:
            raise UserError(f"token id {strange} lies outside the model's vocabulary of {self.vocabulary_size}.")

    def _entry(self, method: str) -> Method:
        return self.package.manifest.methods[method]

    def _positions(self) -> int:
        """E: of a program without a mask the encoder's output has always as many."""
        mask = next((spec for spec in self._entry("decode").inputs if spec.name == MASK), None)
        return (mask or self._entry("encode").outputs[0]).shape[1]


def suppress(logits: torch.Tensor, decoding: Decoding, *, first: bool) -> torch.Tensor:
    """Give ``SUPPRESSED`` to the tokens that the model is never to write, in place.

    Args:
        logits: float [..., V].
        decoding: names the tokens.
        first: whether they are the logits of an answer's first token, which more tokens cannot be.
    """
    tokens = decoding.suppressed + (decoding.suppressed_first if first else [])
    logits[..., tokens] = SUPPRESSED
    return logits


def open_session(package: Package, threads: int | None = None) -> Session | Seq2SeqSession:
    """Load a package's program for decoding, whichever kind of model it is of.

    Raises:
        UserError: see ``open`` of either class.
    """
    if package.manifest.model.task in TASKS:
        return Seq2SeqSession.open(package, threads)
    return open_text_session(package, threads)


def _loaded(program: Program, name: str) -> LoadedMethod:
    method = program.method(name)
    assert method is not None, "checked when the session was opened"
    return method
