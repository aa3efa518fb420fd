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
from tests.zoo.greedy import STEPS, decoded, random_ids, replayed

# The longest first: it fills the cache to its end, and what it leaves there is what the next ones must not see.
PROMPTS = (17, 5, 1)
GARBAGE = 7.0
SAYS = f"""On one loaded program, after prompts of 17, 5 and 1 tokens,

- {STEPS} greedy tokens are those of eager PyTorch with transformers' own cache, and every logit is within the bound;
- windows and chunks of 8 tokens are crossed, and the first prompt goes on to the last position of the cache;
- each prompt gives, bit for bit, what a freshly loaded program gives, whatever the one before it left in the cache;
  with `io` the cache tensors are filled with other numbers before each prompt.
"""


def prove(model: PreTrainedModel, package: Package) -> None:
    """Decode greedily after every prompt, on one loaded program, and compare each step with eager.

    Raises:
        AssertionError: says which prompt and step differ, and how.
    """
    use_threads(1)
    program = Program(package)
    for length in PROMPTS:
        ids = random_ids(length, model.config.vocab_size)
        to_the_end = length == PROMPTS[0]
        session = Session(package, program)
        steps = session.max_length - length if to_the_end else STEPS
        fill_with_garbage(session)
        said = decoded(session, Eager(model), ids, steps)
        assert not to_the_end or session.position == session.max_length
        again = replayed(Session(package, Program(package)), ids, said)
        assert torch.equal(again, said), f"after {length} tokens, a fresh load says something else than a used program"


def fill_with_garbage(session: Session) -> None:
    """Cache tensors that the caller holds may have anything in them when a sequence begins."""
    for tensor in session._cache:
        tensor.fill_(GARBAGE)


class Eager:
    """The model by transformers alone, with the cache that transformers gives it.

    Args:
        model: one that writes text.
        first: further arguments of its first call.
    """

    def __init__(self, model: PreTrainedModel, **first: torch.Tensor) -> None:
        self._model, self._name, self._first = model, cache_argument(model), first
        self._cache: Cache | list[torch.Tensor] | None = state_keeping(model).new_cache(model)
        if (forget := getattr(model.base_model, "_setup_cache", None)) is not None:  # states in attributes of modules
            forget(model.config, 1, torch.device("cpu"), torch.float32)

    @torch.inference_mode()
    def feed(self, ids: list[int]) -> torch.Tensor:
        """Logits ``[V]`` after the last of further tokens."""
        given = {self._name: self._cache, **self._first}
        output = self._model(input_ids=torch.tensor([ids]), use_cache=True, **given)
        self._cache = output.get(self._name, self._cache)  # a cache is written in place, a list of states is not
        self._first = {}
        return output.logits[0, -1]
