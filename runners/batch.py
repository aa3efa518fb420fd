"""Many prompts at once: a program with B rows, each row a sequence at a position of its own.

V vocabulary, n tokens of a call, L cache length.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from runners.errors import UserError
from runners.package import Package
from runners.program import Program
from runners.session import Session
from runners.threads import use_threads


class BatchSession:
    """A program whose rows decode together.

    Tokens that fill up a shorter row are fed at the cache's last position, which is written again before anything
    attends to it. So a row never sees another's tokens, nor those that pad it.
    """

    def __init__(self, package: Package, threads: int | None = None) -> None:
        """Load a package's program.

        Args:
            package: an opened package.
            threads: size of the runtime's thread pool; None: physical cores.

        Raises:
            UserError: the package has one row only, keeps its cache outside the program, or does not load.
        """
        use_threads(threads)
        program = Program(package)
        self._session = Session(package, program)  # what it knows of the package; nothing is fed through it
        method = program.method("forward")
        if self.rows == 1 or method is None or package.manifest.cache is None:
            raise UserError(f"package '{package.manifest.name}' has one row: build it with cache.batch_size above 1.")
        if package.manifest.cache.placement != "buffer":
            raise UserError(f"package '{package.manifest.name}' has its cache outside the program; build with buffer.")
        self._forward = method
        self._lengths = [0] * self.rows

    @property
    def rows(self) -> int:
        """B."""
        return self._session.rows

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens in the cache of each row."""
        return tuple(self._lengths)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Begin a new sequence in each row, with prompts of any lengths.

        Args:
            prompts: ids of at most B rows, each at least one.

        Returns:
            float32 [number of prompts, V]: logits after each prompt's last token.

        Raises:
            UserError: there are more prompts than rows, or one is empty or does not fit.
        """
        if not 0 < len(prompts) <= self.rows:
            raise UserError(f"{len(prompts)} prompts for a program of {self.rows} rows; give 1 to {self.rows}.")
        limit = self._session.max_length
        for number, ids in enumerate(prompts):
            if not 0 < len(ids) <= limit:
                raise UserError(f"prompt {number} has {len(ids)} tokens; the context holds 1 to {limit}.")
        self._lengths = [0] * self.rows
        chunk = self._session.max_chunk
        chunks = [[ids[i : i + chunk] for i in range(0, len(ids), chunk)] for ids in prompts]
        logits = torch.zeros(len(prompts), self._session.vocabulary_size)
        for turn in range(max(map(len, chunks))):
            fed = [row[turn] if turn < len(row) else [] for row in chunks]
            found = self._feed(fed)
            for row, ids in enumerate(fed):
                if ids:
                    logits[row] = found[row]
        return logits

    def step(self, tokens: Sequence[int | None]) -> torch.Tensor:
        """Append one token to each row; None: that row waits.

        Returns:
            float32 [number of tokens, V]; of a row that waits it means nothing. Valid until the next call.

        Raises:
            UserError: a row is full.
        """
        full = [row for row, token in enumerate(tokens) if token is not None and self._is_full(row)]
        if full:
            raise UserError(f"the context of row {full[0]} is full ({self._session.max_length} tokens).")
        return self._feed([[] if token is None else [token] for token in tokens])[: len(tokens)]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        choose: Callable[[torch.Tensor], int],
        *,
        eos_ids: Collection[int],
        max_new_tokens: int,
    ) -> list[list[int]]:
        """Continue every prompt until its end-of-sequence token (not returned), its length, or the cache's end.

        Args:
            prompts: ids of at most B rows.
            choose: the next token for float32 [V] logits.
            eos_ids: tokens that end a row.
            max_new_tokens: of a row at most, 1 or more.

        Raises:
            UserError: the prompts do not fit.
        """
        logits, found = self.prefill(prompts), [list[int]() for _ in prompts]
        going = set(range(len(prompts)))
        while going:
            tokens: list[int | None] = [None] * len(prompts)
            for row in sorted(going):
                token = choose(logits[row])
                if token not in eos_ids:
                    found[row].append(token)
                if token in eos_ids or len(found[row]) >= max_new_tokens or self._is_full(row):
                    going.discard(row)
                else:
                    tokens[row] = token
            if going:
                logits = self.step(tokens)
        return found

    def _is_full(self, row: int) -> bool:
        return self._lengths[row] >= self._session.max_length

    def _feed(self, ids: Sequence[Sequence[int]]) -> torch.Tensor:
        """Feed each row its own number of tokens, aligned at the right; float32 [B, V] of each last one."""
        count = max(map(len, ids))
        tokens = torch.zeros(self.rows, count, dtype=torch.int64)
        positions = torch.full((self.rows, count), self._session.max_length - 1)
        for row, new in enumerate(ids):
            if new:
                tokens[row, -len(new) :] = torch.tensor(new)
                begin = self._lengths[row]
                positions[row, -len(new) :] = torch.arange(begin, begin + len(new))
                self._lengths[row] += len(new)
        logits: torch.Tensor = self._forward.call((tokens, positions), clone_outputs=False)[0]
        return logits[:, -1]
