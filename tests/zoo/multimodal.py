"""Models that read images beside text, and their proof: the program answers about an image as eager PyTorch does."""

from __future__ import annotations

from functools import partial

import torch
import transformers as tf
from transformers import PreTrainedModel

from pipeline.artifacts import Extras
from pipeline.vision import vision_of
from runners.caller import PIXELS
from runners.manifest import ImagePrompt
from runners.multimodal import VISION_ENCODER, MultimodalSession
from runners.package import Package
from runners.preprocessing import ExactSize, ImagePreprocessing
from runners.program import Program
from runners.threads import use_threads
from tests import tiny_vlm
from tests.zoo.greedy import BOUND, STEPS, decoded, distance, random_ids, replayed
from tests.zoo.row import Family
from tests.zoo.text_generation import Eager, fill_with_garbage

IMAGE = tiny_vlm.VOCABULARY - 1  # a token that no answer of these random models holds, as none of a real one does
WORDS = (12, 5, 1)  # tokens beside each image, of which the first stands before it
SEEN = 100 * BOUND  # what another image changes at least
SAYS = f"""On one loaded program, for three images of noise that stand behind the first of 12, 5 and 1 tokens of text,

- {STEPS} greedy tokens are those of eager PyTorch with transformers' own cache, and every logit is within the bound;
- the first answer goes on to the last position of the cache;
- another image changes the logits by more than a hundred times that bound;
- each image gives, bit for bit, what a freshly loaded program gives, whatever the one before it left in the cache;
  with `io` the cache tensors are filled with other numbers before each.
"""


def config(architecture: str) -> tf.PreTrainedConfig:
    """Of a tiny random model that other tests build too."""
    name, settings, _ = tiny_vlm.MODELS[architecture]
    return getattr(tf, name)(**{**settings, "image_token_id": IMAGE})


def extras(before: list[int], after: list[int]) -> Extras:
    """How images are prepared, and the tokens around them."""
    size = ExactSize(height=tiny_vlm.PIXELS, width=tiny_vlm.PIXELS)
    return Extras(
        image=ImagePreprocessing(resizes=(size,), resample="bilinear", crop=None, rescale=None, mean=None, std=None),
        image_prompt=ImagePrompt(token_id=IMAGE, before=before, after=after),
    )


FAMILIES = (
    Family(
        "smolvlm",
        partial(config, "SmolVLMForConditionalGeneration"),
        task="image-text-to-text",
        extras=partial(extras, [301, 302], [301]),
        ci=("buffer",),
    ),
    Family(
        "llava",
        partial(config, "LlavaForConditionalGeneration"),
        task="image-text-to-text",
        extras=partial(extras, [], []),
    ),
)


def prove(model: PreTrainedModel, package: Package) -> None:
    """Answer greedily about images, on one loaded program, and compare each step with eager.

    Raises:
        AssertionError: says which prompt and step differ, and how.
    """
    use_threads(1)
    session, row = MultimodalSession(package, Program(package)), vision_of(model.config)
    for words in WORDS:
        ids, pixels = asking(package, random_ids(words, IMAGE)), noise(words)
        fill_with_garbage(session)
        session.encode({PIXELS: pixels})
        steps = session.max_length - len(ids) if words == WORDS[0] else STEPS
        said = decoded(session, Eager(model, pixel_values=row.pixel_values(pixels)), ids, steps)
        assert words != WORDS[0] or session.position == session.max_length
        fresh, other = (MultimodalSession(package, Program(package)) for _ in range(2))
        fresh.encode({PIXELS: pixels})
        assert torch.equal(replayed(fresh, ids, said), said), f"after {words} words, a fresh load says something else"
        other.encode({PIXELS: noise(words + 100)})
        assert distance(other.prefill(ids), said[0]) > SEEN, "the image is not looked at"


def asking(package: Package, words: list[int]) -> list[int]:
    """The first word, an image, then the others. Token ids."""
    prompt = package.manifest.image_prompt
    assert prompt is not None
    features = package.manifest.methods[VISION_ENCODER].outputs[0].shape[1]
    return [words[0], *prompt.before, *[prompt.token_id] * features, *prompt.after, *words[1:]]


def noise(seed: int) -> torch.Tensor:
    """An image, float32 ``[1, 3, H, W]``."""
    return torch.randn(1, 3, tiny_vlm.PIXELS, tiny_vlm.PIXELS, generator=torch.Generator().manual_seed(seed))
