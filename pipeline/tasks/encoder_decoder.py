"""What the tasks of encoder-decoder models share: ``encode`` reads an input once, ``decode`` writes the answer to it.

S tokens of a call, L decoder's cache length, E most positions of the encoder, e positions of one input, D width, V
vocabulary. Both methods are the model's own ``forward``. Contract: ``encode(input) -> hidden float32 [1, e, D]`` writes
the encoder's keys and values; ``decode(tokens int64 [1, S], position int64 [1], encoder_mask int64 [1, E]) -> logits
float32 [1, 1 or S, V]`` reads them. Where e is always E there is no mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.export import Dim
from transformers import PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache

from pipeline.agreement import require_agreement_with_encoder
from pipeline.artifacts import EncoderInput, Loaded, ProgramFacts, Quantized, Registered
from pipeline.caches import AttentionShape, DeviceEncoderDecoderCache, encoder_decoder_cache, entry_of
from pipeline.caches.measure import layer_shapes
from pipeline.config import CacheSettings, ExportSettings
from pipeline.counting import watched_counting
from pipeline.register import cache_argument, cache_tensors
from pipeline.tasks.plan import Argument, DynamicShape, MethodPlan
from pipeline.tasks.task import Constants
from runners.encoder_decoder import MASK, POSITION, TOKENS
from runners.errors import UserError
from runners.manifest import Cache

_EXAMPLE = 8  # of a dynamic axis; any size but 0 and 1, which torch would take for fixed
_LONGEST_CALL = 32  # tokens: what the decoder is given before it writes is short, and memory is planned for the longest
_SELF, _CROSS = "self_attention_cache", "cross_attention_cache"
_TOKENS, _MASK, _OUTPUTS = "decoder_input_ids", "attention_mask", "encoder_outputs"
HIDDEN, LOGITS = "hidden", "logits"


def max_length(model: PreTrainedModel, settings: CacheSettings) -> int:
    """Return L: as configured, or by default no more than the model was made for.

    Raises:
        UserError: more is asked for.
    """
    config = model.config.get_text_config(decoder=True)
    names = ("max_target_positions", "max_position_embeddings")
    limit = next((value for name in names if (value := getattr(config, name, None)) is not None), None)
    if limit is None or settings.max_length <= limit:
        return settings.max_length
    if "max_length" in settings.model_fields_set:
        raise UserError(
            f"cache.max_length: {settings.max_length} tokens exceed the {limit} positions that the decoder was made "
            f"for; set it to {limit} or less."
        )
    return int(limit)


def register(
    quantized: Quantized, settings: CacheSettings, export: ExportSettings, encoder: EncoderInput
) -> Registered:
    """Return the model with an empty cache for the decoder, and one for the encoder's keys and values.

    Raises:
        UserError: ``export`` asks for attention that is causal by itself, a layer's kind has no device cache, or the
            model says something else with such a cache.
    """
    if export.attention == "custom":
        raise UserError(
            "export.attention: custom is causal by position, and attention to an encoder is not; set it to auto or "
            "portable."
        )
    model, length = quantized.model, max_length(quantized.model, settings)
    with torch.inference_mode():
        start = torch.zeros(1, 1, dtype=torch.int64)
        filled = getattr(
            model(**{encoder.argument: encoder.longest, _TOKENS: start, "use_cache": True}), cache_argument(model)
        )
    if not isinstance(filled, EncoderDecoderCache):
        raise UserError(
            f"model: {type(model).__name__} keeps a {type(filled).__name__}, expected an EncoderDecoderCache."
        )
    cross = [_attention(shape.attention, type(model)) for shape in layer_shapes(filled.cross_attention_cache)]
    positions = encoder.output.last_hidden_state.shape[1]
    shapes = layer_shapes(filled.self_attention_cache)
    trial = encoder_decoder_cache(shapes, cross, length, positions, torch.float32)
    with watched_counting() as counting:
        require_agreement_with_encoder(model, cache_argument(model), encoder.argument, encoder.longest, trial)
    cache = encoder_decoder_cache(shapes, cross, length, positions, torch.float32)
    cache.self_attention_cache.counts_by_number = counting.needs_number
    entry = entry_of(DeviceEncoderDecoderCache)
    tensors = cache_tensors(entry, cache)
    layout = Cache(
        placement="buffer",
        attention="portable",
        max_length=length,
        bytes=sum(tensor.bytes for tensor in tensors),
        tensors=tensors,
    )
    return Registered(model, "portable", cache, entry, layout, quantized.extras, encoder)


def encoder_input(model: PreTrainedModel, name: str, longest: torch.Tensor, shortest: int | None) -> EncoderInput:
    """Return what the encoder takes under ``name``, with the output that it gives for the longest input."""
    argument: str = model.main_input_name
    with torch.inference_mode():
        output = model.get_encoder()(**{argument: longest})
    hidden = output.last_hidden_state
    empty = type(output)(last_hidden_state=torch.zeros(hidden.shape, dtype=torch.float32))
    return EncoderInput(argument, name, longest, shortest, empty)


def plan(registered: Registered, settings: ExportSettings) -> list[MethodPlan]:
    """Return how both methods are traced.

    Raises:
        UserError: ``export.max_prefill_length`` exceeds the cache.
    """
    return [_encode(registered), _decode(registered, settings)]


def _encode(registered: Registered) -> MethodPlan:
    """The whole forward with one token for the decoder, of which all is dropped but the encoder and its keys."""
    encoder, cache, name = _parts(registered)
    # The longest example: torch's choice among convolutions bounds the length to one side of the example's.
    example, dynamic = encoder.longest, None
    if encoder.shortest is not None:
        dynamic = {example.dim() - 1: Dim("positions", min=encoder.shortest, max=example.shape[-1])}
    return MethodPlan(
        name="encode",
        kwargs={
            encoder.argument: example,
            _TOKENS: torch.zeros(1, 1, dtype=torch.int64),
            name: cache.when(encoded=False),
            "use_cache": True,
        },
        dynamic_shapes={encoder.argument: dynamic, _TOKENS: None, name: _fixed(registered), "use_cache": None},
        input_names={encoder.argument: encoder.name},
        outputs=("encoder_last_hidden_state",),
        output_names={"encoder_last_hidden_state": HIDDEN},
        cache=name,
        dropped=(_TOKENS, f"{name}_{_SELF}_position"),
        leaf_uses={_SELF: "unused", _CROSS: "written"},
        # how many positions a convolution leaves of a recording is more than torch can reason about
        defers_guards=example.is_floating_point(),
    )


def _decode(registered: Registered, settings: ExportSettings) -> MethodPlan:
    """The whole forward with the encoder's keys in the cache: what the encoder gave is asked for, and not read."""
    encoder, cache, name = _parts(registered)
    longest = _longest_call(cache.self_attention_cache.max_length, settings)
    output, mask = encoder.output, torch.ones(encoder.output.last_hidden_state.shape[:2], dtype=torch.int64)
    arguments: dict[str, Argument] = {}
    mask_placeholder = _MASK
    if encoder.shortest is not None and "attention_mask" in output.__dataclass_fields__:
        output = type(output)(last_hidden_state=output.last_hidden_state, attention_mask=mask)
        mask_placeholder = f"{_OUTPUTS}_{_MASK}"
    elif encoder.shortest is not None:
        arguments = {_MASK: mask}
    shapes: dict[str, DynamicShape] = dict.fromkeys(arguments)
    return MethodPlan(
        name="decode",
        kwargs={
            _TOKENS: torch.zeros(1, min(_EXAMPLE, longest), dtype=torch.int64),
            _OUTPUTS: output,
            name: cache.when(encoded=True),
            "use_cache": True,
            **arguments,
        },
        dynamic_shapes={
            _TOKENS: {1: Dim("tokens", min=1, max=longest)} if longest > 1 else None,
            _OUTPUTS: [None] * len(output),
            name: _fixed(registered),
            "use_cache": None,
            **shapes,
        },
        input_names={_TOKENS: TOKENS, f"{name}_{_SELF}_position": POSITION, mask_placeholder: MASK},
        outputs=(LOGITS,),
        cache=name,
        dropped=(f"{_OUTPUTS}_last_hidden_state",),
        leaf_uses={_SELF: "written", _CROSS: "read"},
        last_logits=settings.logits == "last" and longest > 1,
    )


def constant_methods(loaded: Loaded, facts: ProgramFacts) -> Constants:
    """Return the program's constants: lengths, and the ids that end an answer."""
    assert facts.cache is not None and loaded.identity.vocabulary_size is not None
    tokens = next(spec for spec in facts.signatures["decode"].inputs if spec.name == TOKENS)
    found: Constants = {
        "get_max_seq_len": tokens.shape[1],
        "get_max_context_len": facts.cache.max_length,
        "get_vocab_size": loaded.identity.vocabulary_size,
        "use_kv_cache": True,
    }
    return found | ({"get_eos_ids": list(loaded.tokenizer.info.eos_ids)} if loaded.tokenizer is not None else {})


def registering(
    make: Callable[[Quantized, CacheSettings], EncoderInput],
) -> Callable[[Quantized, CacheSettings, ExportSettings], Registered]:
    """Return the task's ``register``, from what makes the input of its encoder."""
    return lambda quantized, cache, export: register(quantized, cache, export, make(quantized, cache))


def architectures(*mappings: dict[str, str | Sequence[str]]) -> set[str]:
    """Return the classes that mappings of transformers name."""
    values = [value for mapping in mappings for value in mapping.values()]
    return {name for value in values for name in ([value] if isinstance(value, str) else value)}


def _parts(registered: Registered) -> tuple[EncoderInput, DeviceEncoderDecoderCache, str]:
    assert registered.encoder is not None and isinstance(registered.cache, DeviceEncoderDecoderCache)
    return registered.encoder, registered.cache, cache_argument(registered.model)


def _fixed(registered: Registered) -> list[dict[int, Dim] | None]:
    """No leaf of the cache has a dynamic axis."""
    assert registered.entry is not None and registered.cache is not None
    return [None] * len(registered.entry.named_leaves(registered.cache))


def _longest_call(length: int, settings: ExportSettings) -> int:
    if settings.max_prefill_length is not None and settings.max_prefill_length > length:
        raise UserError(
            f"export.max_prefill_length: {settings.max_prefill_length} tokens do not fit the decoder's cache of "
            f"{length}; give at most that."
        )
    return settings.max_prefill_length or min(_LONGEST_CALL, length)


def _attention(shape: AttentionShape | None, model: type) -> AttentionShape:
    if shape is None:
        raise UserError(f"model: a layer of {model.__name__} keeps no keys of the encoder, and each is to.")
    return shape
