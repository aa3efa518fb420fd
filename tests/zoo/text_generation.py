"""Proof of a row that writes text: the program decodes what eager PyTorch decodes.

V vocabulary, L cache length, n tokens of a prompt.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from pipeline.caches.own_states import state_keeping
from pipeline.register import cache_argument
from runners.package import Package
from runners.program import Program
from runners.session import Session
from runners.threads import use_threads
from tests.zoo.row import Family

# The longest first: it fills the cache to its end, and what it leaves there is what the next ones must not see.
PROMPTS = (17, 5, 1)
STEPS = 24  # greedy tokens after each prompt; windows of the zoo are 8 tokens, which every prompt so crosses
BOUND = 1e-4  # of any logit's difference, in standard deviations of eager's logits over the vocabulary
GARBAGE = 7.0


def prove(family: Family, model: PreTrainedModel, package: Package) -> None:
    """Decode greedily after every prompt, on one loaded program, and compare each step with eager.

    Raises:
        AssertionError: says which prompt and step differ, and how.
    """
    use_threads(1)
    program = Program(package)
    for length in PROMPTS:
        ids = torch.randint(3, model.config.vocab_size, (length,), generator=torch.Generator().manual_seed(length))
        to_the_end = length == PROMPTS[0]
        session = Session(package, program)
        steps = session.max_length - length if to_the_end else STEPS
        _fill_with_garbage(session)
        said = _decoded(session, model, ids.tolist(), steps)
        assert not to_the_end or session.position == session.max_length
        again = _replayed(Session(package, Program(package)), ids.tolist(), said)
        assert torch.equal(again, said), f"after {length} tokens, a fresh load says something else than a used program"


def _fill_with_garbage(session: Session) -> None:
    """Cache tensors that the caller holds may have anything in them when a sequence begins."""
    for tensor in session._cache:
        tensor.fill_(GARBAGE)


def _decoded(session: Session, model: PreTrainedModel, ids: list[int], steps: int) -> torch.Tensor:
    """Logits of the program, float32 ``[steps + 1, V]``, each held against eager's."""
    eager, said, fed = _Eager(model), [], ids
    for step in range(steps + 1):
        logits = session.prefill(fed).clone()
        expected = eager.feed(fed)
        where = f"after a prompt of {len(ids)} tokens, at step {step}"
        difference = ((logits - expected).abs().max() / expected.std()).item()
        assert difference < BOUND, f"{where}, logits differ by {difference:.2g} of their spread"
        best, second = expected.topk(2).values
        assert best - second > 2 * BOUND * expected.std(), f"{where}, eager's choice is a tie: take other weights"
        token = int(expected.argmax())
        assert int(logits.argmax()) == token, f"{where}, the program chooses {int(logits.argmax())}, eager {token}"
        said.append(logits)
        fed = [token]
    return torch.stack(said)


def _replayed(session: Session, ids: list[int], said: torch.Tensor) -> torch.Tensor:
    """Logits of another session that is fed what ``said`` was fed."""
    tokens = [[int(logits.argmax())] for logits in said[:-1]]
    return torch.stack([session.prefill(fed).clone() for fed in (ids, *tokens)])


class _Eager:
    """The model by transformers alone, with the cache that transformers gives it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._name = model, cache_argument(model)
        self._cache: Cache | list[torch.Tensor] | None = state_keeping(model).new_cache(model)
        if (forget := getattr(model.base_model, "_setup_cache", None)) is not None:  # states in attributes of modules
            forget(model.config, 1, torch.device("cpu"), torch.float32)

    @torch.inference_mode()
    def feed(self, ids: list[int]) -> torch.Tensor:
        """Logits ``[V]`` after the last of further tokens."""
        output = self._model(input_ids=torch.tensor([ids]), use_cache=True, **{self._name: self._cache})
        self._cache = output.get(self._name, self._cache)  # a cache is written in place, a list of states is not
        return output.logits[0, -1]
