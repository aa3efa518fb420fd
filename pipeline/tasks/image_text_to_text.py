"""Models that answer questions about images: three methods, under the names of ExecuTorch's own multimodal runner.

S tokens of a call, L cache length, T features that one image becomes, D width of an embedding, H, W an image's size in
pixels, V vocabulary. ``vision_encoder(pixels float32 [1, 3, H, W]) -> features float32 [1, T, D]``;
``token_embedding(tokens int64 [1, S]) -> embeddings float32 [1, S, D]``; ``text_decoder(embeddings float32 [1, S, D],
position int64 [1]) -> logits float32 [1, S or 1, V]`` is the model's own ``forward``, and has the cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from pydantic import JsonValue
from torch.export import Dim
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from pipeline.artifacts import Extras, Loaded, ProgramFacts, Quantized, Registered
from pipeline.cases import Case, identity_of
from pipeline.config import BuildSettings, CacheSettings, CheckSettings, ExportSettings
from pipeline.goldens import Prompt
from pipeline.preprocessor import read_image_preprocessing
from pipeline.prompts import image_prompts_of, prompts_of, text_ids
from pipeline.record import Greedy, Recorded, record_along
from pipeline.register import cache_argument, register
from pipeline.tasks import text_generation
from pipeline.tasks.plan import DynamicShape, MethodPlan
from pipeline.tasks.settings import IMAGE_TEXT_TO_TEXT as SETTINGS
from pipeline.tasks.task import Constants, Task
from pipeline.vision import FEATURES, image_size, read_image_prompt, vision_of
from runners.caller import LOGITS, PIXELS, TOKENS
from runners.errors import UserError
from runners.image import preprocess, read_image
from runners.multimodal import TEXT_DECODER, TOKEN_EMBEDDING, VISION_ENCODER
from runners.preprocessing import Size

EMBEDDINGS, POSITION = "embeddings", "position"
_EXAMPLE = 8  # of the dynamic axis; any length but 0 and 1, which torch would take for fixed


def plan(registered: Registered, settings: ExportSettings) -> list[MethodPlan]:
    """Return how the three methods are traced.

    Raises:
        UserError: ``export.max_prefill_length`` does not fit the model.
    """
    longest = text_generation.longest_call(registered, settings)
    return [_vision_encoder(registered), _token_embedding(longest), _text_decoder(registered, settings, longest)]


def _vision_encoder(registered: Registered) -> MethodPlan:
    size = _size(registered.extras)
    return MethodPlan(
        name=VISION_ENCODER,
        kwargs={PIXELS: torch.zeros(1, 3, size.height, size.width)},
        dynamic_shapes={PIXELS: None},
        input_names={},
        outputs=(FEATURES,),
        forward=vision_of(registered.model.config).features,
        attention="whole",
        folds_constants=True,
    )


def _token_embedding(longest: int) -> MethodPlan:
    return MethodPlan(
        name=TOKEN_EMBEDDING,
        kwargs={TOKENS: torch.zeros(1, min(_EXAMPLE, longest), dtype=torch.int64)},
        dynamic_shapes={TOKENS: _tokens(longest)},
        input_names={},
        outputs=(EMBEDDINGS,),
        forward=_embeddings,
    )


def _embeddings(model: PreTrainedModel, tokens: torch.Tensor) -> Mapping[str, torch.Tensor]:
    return {EMBEDDINGS: model.get_input_embeddings()(tokens)}


def _text_decoder(registered: Registered, settings: ExportSettings, longest: int) -> MethodPlan:
    assert registered.cache is not None and registered.entry is not None
    model, name = registered.model, cache_argument(registered.model)
    width = model.get_input_embeddings().weight.shape[1]
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    keep = {"logits_to_keep": 1} if settings.logits == "last" and keeps else {}
    leaves: DynamicShape = [None] * len(registered.entry.named_leaves(registered.cache))
    return MethodPlan(
        name=TEXT_DECODER,
        kwargs={"inputs_embeds": torch.zeros(1, min(_EXAMPLE, longest), width), name: registered.cache, **keep},
        dynamic_shapes={"inputs_embeds": _tokens(longest), name: leaves, **dict.fromkeys(keep)},
        input_names={"inputs_embeds": EMBEDDINGS, f"{name}_position": POSITION},
        outputs=(LOGITS,),
        cache=name,
        last_logits=settings.logits == "last" and not keeps,
    )


def _tokens(longest: int) -> dict[int, Dim] | None:
    return {1: Dim("tokens", min=1, max=longest)} if longest > 1 else None


def _register(quantized: Quantized, settings: CacheSettings, export: ExportSettings) -> Registered:
    """As ``register``, of a model whose images are features among its text.

    Raises:
        UserError: also where the model reads images in another way.
    """
    model = quantized.model
    if not hasattr(model, "get_image_features") or model.config.is_encoder_decoder:
        raise UserError(
            f"model: {type(model).__name__} does not read images as features among the embeddings of its tokens (it "
            "has no get_image_features, or an encoder beside its decoder), and no other way is supported."
        )
    if "token_type_ids" in inspect.signature(model.forward).parameters:
        raise UserError(
            f"model: in {type(model).__name__} the features of one image see each other, and those that follow (it "
            "takes token_type_ids); a program reads its embeddings from first to last. Its text alone can be built, "
            "where the model has a causal class of its own: set model.task to text-generation."
        )
    return replace(register(quantized, settings, export), extras=quantized.extras)


def _extras(folder: Path | None, config: PreTrainedConfig) -> Extras:
    """The preprocessing of images, and what an image becomes in a prompt.

    Raises:
        UserError: the source is one file, says not how images are prepared, or its images have another size than the
            model's.
    """
    if folder is None:
        raise UserError("model.source: a single file says not how images are prepared; give the model's folder.")
    image = read_image_preprocessing(folder, split_images=False)
    wanted, size = image_size(config), image.output_size
    if size is None or (size.height, size.width) != wanted:
        given = "the size that their aspect ratio asks for" if size is None else f"{size.height} x {size.width} pixels"
        raise UserError(
            f"{folder}: its preprocessor gives images of {given}, its config says {wanted[0]} x {wanted[1]} "
            "(vision_config.image_size); a program takes images of one size: correct one of the two."
        )
    return Extras(image=image, image_prompt=read_image_prompt(folder, config))


def _size(extras: Extras) -> Size:
    assert extras.image is not None and extras.image.output_size is not None, "seen to when the model was loaded"
    return extras.image.output_size


def _constant_methods(loaded: Loaded, facts: ProgramFacts) -> Constants:
    decoder = {"forward": facts.signatures[TEXT_DECODER]}
    return text_generation.constant_methods(loaded, facts.model_copy(update={"signatures": decoder}))


def _architectures() -> Collection[str]:
    return set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values())


def _is_checked(check: CheckSettings) -> bool:
    return bool(check.prompts or check.perplexity)


def _prompts(loaded: Loaded, settings: BuildSettings) -> list[Prompt]:
    """The check's texts by themselves, then each of its images with one of them; without images, noise.

    Raises:
        UserError: an image cannot be read, or a prompt does not fit the cache.
    """
    check, extras = settings.check, loaded.extras
    assert loaded.tokenizer is not None and extras.image is not None and extras.image_prompt is not None
    prompts = prompts_of(check, loaded.tokenizer, settings.cache.max_length)
    if not check.prompts:
        if check.images:
            raise UserError("check.images: images are asked about with check.prompts; give some.")
        return prompts
    given = {str(path): preprocess(read_image(path), extras.image) for path in check.images}
    images = given or {"<noise>": _noise(_size(extras))}
    features = _number_of_features(loaded.model, _size(extras))
    asked = image_prompts_of(
        check, loaded.tokenizer, settings.cache.max_length, list(images), extras.image_prompt, features
    )
    row = vision_of(loaded.model.config)
    return prompts + [
        replace(prompt, encoder={PIXELS: pixels}, arguments={"pixel_values": row.pixel_values(pixels)})
        for prompt, pixels in zip(asked, images.values(), strict=True)
    ]


def _noise(size: Size) -> torch.Tensor:
    return torch.randn(1, 3, size.height, size.width, generator=torch.Generator().manual_seed(0))


def _number_of_features(model: PreTrainedModel, size: Size) -> int:
    """T, as the model's own code makes them."""
    with torch.inference_mode():
        features = vision_of(model.config).features(model, _noise(size))[FEATURES]
    return int(features.shape[1])


def _prepare(loaded: Loaded, settings: BuildSettings) -> JsonValue:
    prompts = _prompts(loaded, settings)
    return identity_of([Case(prompt.name, prompt.text, prompt.encoder, prompt.ids) for prompt in prompts])


def _record(
    loaded: Loaded, quantized: Quantized, settings: BuildSettings, _drafts: Sequence[torch.Tensor] | None
) -> Recorded:
    assert loaded.tokenizer is not None
    check = settings.check
    ids, perplexity = text_ids(check, loaded.tokenizer), check.perplexity
    text = ids[: perplexity.tokens] if ids is not None and perplexity is not None else None
    greedy = Greedy(check.steps, frozenset(loaded.tokenizer.info.eos_ids))
    window = perplexity.window if perplexity is not None else 0
    return record_along(loaded.model, quantized.model, _prompts(loaded, settings), greedy, text, window)


IMAGE_TEXT_TO_TEXT = Task(
    name="image-text-to-text",
    auto_model=AutoModelForImageTextToText,
    architectures=_architectures,
    needs_tokenizer=True,
    register=_register,
    plan=plan,
    constant_methods=_constant_methods,
    is_checked=_is_checked,
    draft=None,
    record=_record,
    prepare=_prepare,
    extras=_extras,
    settings=SETTINGS,
)
