"""Stage: what the package's program writes after each prompt of the check: a guess of what eager PyTorch will.

A guess that is right saves eager PyTorch the steps one by one; one that is wrong changes nothing that is recorded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from pipeline.goldens import Prompt
from runners.choices import Row, likeliest
from runners.generate import generate
from runners.package import open_package
from runners.session import Session


def draft(directory: Path, prompts: Sequence[Prompt], steps: int, eos_ids: Collection[int]) -> tuple[torch.Tensor, ...]:
    """The program's greedy tokens after each prompt, int64 [1 to steps]: an end-of-sequence token is the last.

    Args:
        directory: A package; it need not have goldens.
        prompts: Each starts from an empty cache.
        steps: Tokens a prompt at most.
        eos_ids: Tokens that end those of a prompt which says so (``Prompt.to_eos``).
    """
    with _torch_threads_kept():
        # One thread: for steps this short more gain little, and on a busy machine they wait longer than they work.
        session = Session.open(open_package(directory, verify=False), threads=1)
        ends = frozenset(eos_ids)
        return tuple(_draft(session, p, steps, ends if p.to_eos else frozenset()) for p in prompts)


def _draft(session: Session, prompt: Prompt, steps: int, eos_ids: frozenset[int]) -> torch.Tensor:
    tokens: list[int] = []

    def choose(row: Row) -> int:
        tokens.append(likeliest(row)[0])
        return tokens[-1]

    session.reset()
    generate(session, prompt.ids.tolist(), choose, eos_ids=eos_ids, max_new_tokens=steps, emit=lambda _: None)
    return torch.tensor(tokens)


@contextmanager
def _torch_threads_kept() -> Iterator[None]:
    """A session takes PyTorch's threads, which eager execution needs afterwards."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
