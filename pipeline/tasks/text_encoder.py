"""What the tasks of text encoders share: one method ``forward``, no cache.

S tokens of a call, at most ``export.max_length``. Contract: ``(tokens int64 [1, S], attention_mask int64 [1, S]) ->``
one output, float32 ``[1, S, …]``; a token whose mask is 0 is padding, which no other token sees.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import torch
from tokenizers import Tokenizer
from torch import nn
from torch.export import Dim
from transformers import PreTrainedModel

from pipeline.artifacts import Loaded, LoadedTokenizer, ProgramFacts, Quantized, Registered
from pipeline.cases import Case, Output
from pipeline.config import BuildSettings, CacheSettings, CheckSettings, ExportSettings
from pipeline.tasks.plan import MethodPlan
from pipeline.tasks.task import Constants
from runners.caller import MASK, TOKENS, text_inputs
from runners.errors import UserError
from runners.tokenizer import TextCodec

ARGUMENTS = {TOKENS: "input_ids", MASK: "attention_mask"}
_EXAMPLE_TOKENS = 8  # of the dynamic axis; any length but 0 and 1, which torch would take for fixed
_PADDING = 7  # tokens of the padded case


def without_cache(quantized: Quantized, _cache: CacheSettings, export: ExportSettings) -> Registered:
    """The model as it is: there is no cache to give it.

    Raises:
        UserError: ``export`` asks for the attention that reads a cache.
    """
    if export.attention == "custom":
        raise UserError(
            "export.attention: custom is causal and reads a cache, and this model has none; set it to auto or portable."
        )
    return Registered(quantized.model, "portable", None, None, None, quantized.extras)


def plan_of(output: Output) -> Callable[[Registered, ExportSettings], list[MethodPlan]]:
    """What gives the plan of a text encoder with this output."""

    def plan(registered: Registered, settings: ExportSettings) -> list[MethodPlan]:
        model = registered.model
        parameters = inspect.signature(model.forward).parameters
        if lacks := [argument for argument in ARGUMENTS.values() if argument not in parameters]:
            raise UserError(f"model: the forward of {type(model).__name__} takes no {', '.join(lacks)}.")
        longest = longest_text(model, settings.max_length)
        example = torch.ones(1, min(_EXAMPLE_TOKENS, longest), dtype=torch.int64)
        dynamic = {1: Dim("tokens", min=1, max=longest)} if longest > 1 else None
        return [
            MethodPlan(
                name="forward",
                kwargs={argument: example.clone() for argument in ARGUMENTS.values()},
                dynamic_shapes=dict.fromkeys(ARGUMENTS.values(), dynamic),
                input_names={argument: name for name, argument in ARGUMENTS.items()},
                outputs=(output.field,),
                output_names={output.field: output.name},
            )
        ]

    return plan


def longest_text(model: PreTrainedModel, wanted: int | None) -> int:
    """Return the tokens of a text at most: ``wanted``, or the positions that the model was made for.

    Raises:
        UserError: it has fewer than wanted, or none is wanted and its config states no number.
    """
    stated: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    limit = stated - _unused_positions(model, stated) if stated is not None else wanted
    if limit is None:
        raise UserError(
            f"export.max_length: the config of {type(model).__name__} states no max_position_embeddings; give the "
            "tokens of a text at most."
        )
    if wanted is not None and wanted > limit:
        raise UserError(
            f"export.max_length: {wanted} tokens exceed the {limit} positions that the model was made for; set it to "
            f"{limit} or less."
        )
    return wanted or limit


def _unused_positions(model: PreTrainedModel, positions: int) -> int:
    """Models after RoBERTa count positions from behind that of padding: the first rows of their table are not used."""
    for name, module in model.named_modules():
        is_table = isinstance(module, nn.Embedding) and module.num_embeddings == positions and "position" in name
        if is_table and module.padding_idx is not None:
            return int(module.padding_idx) + 1
    return 0


def no_constants(_loaded: Loaded, _facts: ProgramFacts) -> Constants:
    """The constant methods: no app reads any of such a program."""
    return {}


def has_texts(check: CheckSettings) -> bool:
    """Whether there is anything to check."""
    return bool(check.prompts or check.token_ids)


def cases_of(loaded: Loaded, settings: BuildSettings, rows: Callable[[torch.Tensor], torch.Tensor]) -> list[Case]:
    """Return every case of the check: the texts, one that has as many tokens as a call takes, and one with padding.

    Args:
        loaded: the model and its tokenizer.
        settings: give the texts.
        rows: which rows of the output are recorded, int64 ``[R]``, of a text's ids, int64 ``[n]``.

    Raises:
        UserError: a text does not fit the model, or there is no tokenizer to read it with.
    """
    longest = longest_text(loaded.model, settings.export.max_length)
    texts = list(_texts(loaded, settings.check, longest))
    cases = [_case(name, text, ids, rows) for name, text, ids in texts]
    if settings.check.to_the_end:
        joined = [token for _, _, ids in texts for token in ids]
        filler = (joined * (longest // len(joined) + 1))[:longest]
        cases.append(_case("to_the_end", f"<{longest} tokens of the texts>", filler, rows))
    _, text, ids = texts[0]
    padding = min(_PADDING, longest - len(ids))
    if padding > 0:
        cases.append(_padded(_case("padded", text, ids, rows), padding, _padding_id(loaded)))
    return cases


def special_token_id(tokenizer: LoadedTokenizer | None, name: str) -> int | None:
    """Return the id of a special token, such as ``mask_token``; None where there is none."""
    token = tokenizer.info.special_tokens.get(name) if tokenizer is not None else None
    if tokenizer is None or token is None:
        return None
    found: int | None = Tokenizer.from_str(tokenizer.tokenizer_json).token_to_id(token)
    return found


def _texts(loaded: Loaded, check: CheckSettings, longest: int) -> Iterator[tuple[str, str, list[int]]]:
    """Name, text and ids of what the configuration gives."""
    tokenizer = loaded.tokenizer
    if check.prompts and tokenizer is None:
        raise UserError("check.prompts: the source has no tokenizer to read them with; give check.token_ids instead.")
    if check.prompts and tokenizer is not None:
        codec = TextCodec(Tokenizer.from_str(tokenizer.tokenizer_json), tokenizer.info)
        for number, text in enumerate(check.prompts):
            yield str(number), text, _fitting(codec.encode(text), "check.prompts", number, loaded, longest)
    for number, given in enumerate(check.token_ids):
        ids = _fitting(list(given), "check.token_ids", number, loaded, longest)
        yield f"ids {number}", f"<{len(ids)} token ids>", ids


def _fitting(ids: list[int], key: str, number: int, loaded: Loaded, longest: int) -> list[int]:
    size = loaded.identity.vocabulary_size
    if not 0 < len(ids) <= longest:
        raise UserError(
            f"{key}: entry {number} has {len(ids)} tokens; a call takes 1 to {longest} (export.max_length). Shorten it."
        )
    if size is not None and max(ids) >= size:
        raise UserError(f"{key}: entry {number} has the token {max(ids)}; the model's vocabulary ends at {size - 1}.")
    return ids


def _case(name: str, text: str, ids: list[int], rows: Callable[[torch.Tensor], torch.Tensor]) -> Case:
    return Case(name, text, text_inputs(ids), rows(torch.tensor(ids, dtype=torch.int64)))


def _padded(case: Case, padding: int, token: int) -> Case:
    tokens = nn.functional.pad(case.inputs[TOKENS], (0, padding), value=token)
    mask = nn.functional.pad(case.inputs[MASK], (0, padding), value=0)
    return Case(case.name, case.text, {TOKENS: tokens, MASK: mask}, case.rows)


def _padding_id(loaded: Loaded) -> int:
    found = special_token_id(loaded.tokenizer, "pad_token")
    stated = getattr(loaded.model.config, "pad_token_id", None)
    return found if found is not None else stated if stated is not None else 0
