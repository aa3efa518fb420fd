"""Load a tokenizer through transformers and keep what a runner needs of it."""

from __future__ import annotations

import json
import warnings

from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from pipeline.artifacts import LoadedTokenizer
from pipeline.quiet import quiet_transformers
from pipeline.sources import Fetched
from runners.errors import UserError
from runners.manifest import CHAT_TEMPLATE_NAME, TOKENIZER_NAME, Tokenizer

GENERATION_CONFIG = "generation_config.json"


def load_tokenizer(fetched: Fetched, config: PreTrainedConfig, *, trust_remote_code: bool) -> LoadedTokenizer | None:
    """The tokenizer of a source; None where the source has none.

    Raises:
        UserError: its files cannot be loaded, or it has no fast (``tokenizers``) form.
    """
    if not fetched.has_tokenizer:
        return None
    tokenizer = _load(fetched, trust_remote_code)
    if not tokenizer.is_fast:
        raise UserError(
            f"{fetched.path}: its tokenizer ({type(tokenizer).__name__}) exists in Python only; a package needs one of "
            f"the tokenizers library: put a {TOKENIZER_NAME} beside the model"
        )
    backend = FastTokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    # saved limits of a training set-up would cut prompts without a word
    backend.no_truncation()
    backend.no_padding()
    _check_vocabulary(backend, config, fetched)
    template = chat_template(tokenizer)
    info = Tokenizer(
        file=TOKENIZER_NAME,
        chat_template=CHAT_TEMPLATE_NAME if template is not None else None,
        bos_id=tokenizer.bos_token_id,
        eos_ids=eos_ids(_generation_config(fetched), config, tokenizer),
        adds_bos=tokenizer.bos_token_id is not None and backend.encode("a").ids[:1] == [tokenizer.bos_token_id],
        special_tokens=dict(tokenizer.special_tokens_map),
    )
    return LoadedTokenizer(backend.to_str(), template, info)


def chat_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The chat template; of several named ones, the default."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return None if template is None else str(template)


def eos_ids(
    generation: GenerationConfig | None, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """Every token that ends an answer, each once, in the order in which transformers looks for them."""
    # a config of several parts keeps them in that of its text
    configs = [getattr(part, "eos_token_id", None) for part in (config, config.get_text_config(decoder=True))]
    stated = [generation.eos_token_id if generation else None, *configs, tokenizer.eos_token_id]
    flat = [token for ids in stated for token in (ids if isinstance(ids, list | tuple) else [ids]) if token is not None]
    return list(dict.fromkeys(int(token) for token in flat))


def _load(fetched: Fetched, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    folder, gguf_file = (fetched.path.parent, fetched.path.name) if fetched.kind == "gguf" else (fetched.path, None)
    options = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust_remote_code, **options
            )
    # each tokenizer class fails on damaged files in a way of its own
    except Exception as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{fetched.path}: its tokenizer cannot be loaded: {said}") from error


def _generation_config(fetched: Fetched) -> GenerationConfig | None:
    path = fetched.path / GENERATION_CONFIG
    if not path.is_file():
        return None
    try:
        return GenerationConfig.from_dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error


def _check_vocabulary(backend: FastTokenizer, config: PreTrainedConfig, fetched: Fetched) -> None:
    largest = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
    size = config.get_text_config().vocab_size
    if largest >= size:
        warnings.warn(
            f"{fetched.path}: the tokenizer has ids up to {largest}, and the model's vocabulary {size} "
            "tokens: a prompt with such a token cannot be run",
            stacklevel=2,
        )
