"""Goldens of encoder-decoder models, from eager PyTorch: the model's own ``forward`` and transformers' own cache.

N steps of a prompt, V vocabulary, n tokens that an answer begins with.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from pipeline.artifacts import Loaded, Quantized
from pipeline.goldens import Prompt, Recording, assemble, full_logits, rounding
from pipeline.quantization.reference import quantizes_activations, reference_of
from pipeline.record import Recorded
from runners.encoder_decoder import suppress
from runners.goldens import summarise
from runners.manifest import Decoding


@dataclass(frozen=True)
class Answers:
    """How answers are recorded.

    Args:
        argument: of the model's forward, that takes the encoder's input.
        decoding: which tokens are left out.
        steps: tokens of an answer at most.
        eos_ids: tokens that end one.
    """

    argument: str
    decoding: Decoding
    steps: int
    eos_ids: Collection[int]


def record_answers(loaded: Loaded, quantized: Quantized, prompts: Sequence[Prompt], how: Answers) -> Recorded:
    """Run both models along the greedy answers of the package's model.

    Args:
        loaded: the source's model.
        quantized: the package's.
        prompts: each with one input of the encoder.
        how: the answers.
    """
    reference = reference_of(quantized.model)
    ours = tuple(_recording(greedy_answer(reference, prompt, how)) for prompt in prompts)
    del reference  # float64 takes twice its memory
    pairs = list(zip(prompts, ours, strict=True))
    floors = None
    if quantizes_activations(quantized.model):
        precise = reference_of(quantized.model, torch.float64)
        rows = [forced_answer(precise, p, r.reference.tokens, how, torch.float64) for p, r in pairs]
        floors = [rounding(logits.float(), r) for logits, r in zip(rows, ours, strict=True)]
    theirs = tuple(_recording(forced_answer(loaded.model, p, r.reference.tokens, how)) for p, r in pairs)
    return Recorded(assemble(prompts, ours, theirs, None, floors), full_logits(prompts, ours, theirs))


def greedy_answer(model: PreTrainedModel, prompt: Prompt, how: Answers) -> torch.Tensor:
    """Logits of N greedy steps, float ``[N, V]``, each token fed alone behind those that the answer begins with."""
    with torch.no_grad():
        encoded = model.get_encoder()(**_inputs(prompt, how, torch.float32))
    fed, cache, rows = prompt.ids, None, []
    for step in range(how.steps):
        with torch.no_grad():
            output = model(encoder_outputs=encoded, decoder_input_ids=fed.unsqueeze(0), cache=cache, use_cache=True)
        cache = output.cache
        rows.append(suppress(output.logits[0, -1].clone(), how.decoding, first=step == 0))
        fed = rows[-1].argmax(-1, keepdim=True)
        if int(fed) in how.eos_ids:
            break
    return torch.stack(rows)


def forced_answer(
    model: PreTrainedModel, prompt: Prompt, forced: torch.Tensor, how: Answers, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The same logits along given tokens, int64 ``[N]``, by one ``forward`` without a cache; ``dtype``: the model's."""
    ids = torch.cat([prompt.ids, forced[:-1]]).unsqueeze(0)
    with torch.no_grad():
        output = model(**_inputs(prompt, how, dtype), decoder_input_ids=ids, use_cache=False)
    logits = suppress(output.logits[0, -forced.shape[0] :].clone(), how.decoding, first=False)
    suppress(logits[:1], how.decoding, first=True)
    return logits


def _inputs(prompt: Prompt, how: Answers, dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
    (tensor,) = prompt.encoder.values()
    return {how.argument: tensor.to(dtype) if tensor.is_floating_point() else tensor}


def _recording(logits: torch.Tensor) -> Recording:
    return Recording(summarise(logits), logits)
