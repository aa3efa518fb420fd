"""Models without a cache that read a text or an image, and their proofs: one call says what eager PyTorch says.

S tokens of a text, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import transformers as tf
from transformers import PreTrainedModel

from pipeline.artifacts import Extras
from runners.caller import MASK, PIXELS, Caller, max_tokens, text_inputs
from runners.package import Package
from runners.preprocessing import ExactSize, ImagePreprocessing
from runners.program import Program
from runners.threads import use_threads
from tests import tiny_encoders
from tests.zoo.greedy import BOUND, distance, random_ids
from tests.zoo.row import Family

TEXTS = (17, 5, 1)  # tokens; the longest that a program takes comes before them
IMAGES = 3
SEEN = 100 * BOUND  # what another input changes at least
TEXT_SAYS = """On one loaded program, for texts of the most tokens that it takes, and of 17, 5 and 1,

- every value of the output is within the bound of eager PyTorch's;
- so it is where the text is padded to the most tokens, and the padding's `attention_mask` is 0 (with 1 it is not);
- each text gives, bit for bit, what a freshly loaded program gives.
"""
IMAGE_SAYS = f"""On one loaded program, for {IMAGES} images of noise,

- every logit is within the bound of eager PyTorch's, and another image changes them by a hundred times that;
- each image gives, bit for bit, what a freshly loaded program gives.
"""


def config(architecture: str) -> tf.PreTrainedConfig:
    """Of a tiny random model that other tests build too."""
    name, settings = tiny_encoders.MODELS[architecture]
    # Of DeiT transformers has two classes for one task, and tells them apart by this.
    return getattr(tf, name)(**settings, architectures=[architecture])


def image() -> Extras:
    size = ExactSize(height=tiny_encoders.PIXELS, width=tiny_encoders.PIXELS)
    return Extras(
        image=ImagePreprocessing(resizes=(size,), resample="bilinear", crop=None, rescale=None, mean=None, std=None)
    )


CONFIGS: dict[str, Callable[[], tf.PreTrainedConfig]] = {
    "bert": partial(config, "BertForMaskedLM"),
    "distilbert": partial(config, "DistilBertForMaskedLM"),
    "albert": partial(config, "AlbertForMaskedLM"),
    "modernbert": partial(config, "ModernBertModel"),
}
VISION = dict(task="image-classification", extras=image, placements=("none",))
FAMILIES = (
    *(
        Family(name, make, task="embedding", placements=("none",), ci=("none",) if name == "bert" else ())
        for name, make in CONFIGS.items()
    ),
    *(
        Family(name, make, task="fill-mask", placements=("none",), ci=("none",) if name == "distilbert" else ())
        for name, make in CONFIGS.items()
    ),
    Family("vit", partial(config, "ViTForImageClassification"), **VISION, ci=("none",)),
    Family("deit", partial(config, "DeiTForImageClassification"), **VISION),
)


def prove_text(model: PreTrainedModel, package: Package) -> None:
    """Read texts of several lengths, with padding and without.

    Raises:
        AssertionError: says which text differs, and how.
    """
    use_threads(1)
    caller, longest = Caller(package, Program(package)), max_tokens(package)
    for length in (longest, *TEXTS):
        ids = random_ids(length, model.config.vocab_size)
        found, expected = _output(caller, text_inputs(ids)), _eager(model, input_ids=torch.tensor([ids]))
        _assert_close(found, expected, f"of {length} tokens")
        fresh = _output(Caller(package, Program(package)), text_inputs(ids))
        assert torch.equal(found, fresh), f"of {length} tokens, a fresh load says something else than a used program"
        if length < longest:
            padded = text_inputs([*ids, *[model.config.pad_token_id or 0] * (longest - length)])
            unmasked = _output(caller, padded)[:, :length]
            padded[MASK][:, length:] = 0
            _assert_close(_output(caller, padded)[:, :length], expected, f"of {length} tokens, padded to {longest}")
            assert distance(unmasked, expected) > SEEN, "the mask is not read"


def prove_image(model: PreTrainedModel, package: Package) -> None:
    """Classify images of noise.

    Raises:
        AssertionError: says which image differs, and how.
    """
    use_threads(1)
    caller = Caller(package, Program(package))
    (spec,) = package.manifest.methods["forward"].inputs
    before: torch.Tensor | None = None
    for seed in range(IMAGES):
        pixels = torch.randn(spec.shape, generator=torch.Generator().manual_seed(seed))
        found, expected = _output(caller, {PIXELS: pixels}), _eager(model, pixel_values=pixels)
        _assert_close(found, expected, f"of image {seed}")
        fresh = _output(Caller(package, Program(package)), {PIXELS: pixels})
        assert torch.equal(found, fresh), f"of image {seed}, a fresh load says something else than a used program"
        assert before is None or distance(before, found) > SEEN, "the image is not looked at"
        before = found


def _output(caller: Caller, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    (output,) = caller.call(inputs).values()
    return output


@torch.inference_mode()
def _eager(model: PreTrainedModel, **inputs: torch.Tensor) -> torch.Tensor:
    output = model(**inputs)
    return output.logits if "logits" in output else output.last_hidden_state


def _assert_close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    difference = distance(found, expected)
    assert found.shape == expected.shape, f"{what}, the output has shape {found.shape}, eager's {expected.shape}"
    assert difference < BOUND, f"{what}, the output differs by {difference:.2g} of its spread"
