"""Whether ExecuTorch's stock LLM runner can run a program, and why not.

Every rule is read from ``extension/llm/runner`` of ExecuTorch 1.5 (the function is named beside it); the apps' classes
(``LlmModule`` on Android, ``ExecuTorchLLM`` on iOS, ``TextLLMRunner`` in Python) wrap that same code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from runners.pte import (
    MethodDescription,
    ProgramDescription,
    TensorDescription,
    backends_required,
    operators_required,
)

LOGIT_DTYPES = ("float32", "float16", "bfloat16")
DEFAULT_FLAGS = {"enable_dynamic_shape": False, "use_kv_cache": True, "use_sdpa_with_kv_cache": False}
MAX_SEQ_LEN, MAX_CONTEXT_LEN, EOS_IDS = "get_max_seq_len", "get_max_context_len", "get_eos_ids"
MULTIMODAL = ("vision_encoder", "token_embedding", "text_decoder")  # of the runner for images beside text
NOT_READ = {"get_eos_id": f"the runner reads {EOS_IDS}", "get_n_eos": f"the runner reads {EOS_IDS}"}
_CUSTOM_LIBRARIES = {
    "llama::": "the custom-ops library (in Python: import executorch.extension.llm.custom_ops.custom_ops)",
    "quantized_decomposed::": "the quantized-kernels library (in Python: import executorch.kernels.quantized)",
    "torchao::": "the torchao kernels library",
}


@dataclass(frozen=True)
class Verdict:
    """The answer, and what it rests on."""

    loads: bool
    reasons: tuple[str, ...]  # why not; empty if it loads
    notes: tuple[str, ...]  # what an app must know though it loads


def stock_runner_verdict(description: ProgramDescription, tokenizer_vocabulary: int | None = None) -> Verdict:
    """Check a program against the stock runner's contract.

    Args:
        description: The program.
        tokenizer_vocabulary: Tokens the tokenizer knows, where it is at hand: the runner samples among so many logits.
    """
    methods = _methods_used(description)
    reasons = [] if methods else [_no_method(description)]
    reasons += _constant_faults(description)
    for method in methods:
        reasons += _input_faults(method, description)
        reasons += _output_faults(method, tokenizer_vocabulary)
    reasons += _pair_faults(methods)
    return Verdict(loads=not reasons, reasons=tuple(reasons), notes=tuple(_notes(description, methods)))


def _methods_used(description: ProgramDescription) -> list[MethodDescription]:
    """The method that reads the prompt, then the one that generates, where it is another (create_text_llm_runner)."""
    first = description.method("forward") or description.method("prefill")
    second = description.method("decode")
    return [method for method in (first, second) if method is not None] if first else []


def _no_method(description: ProgramDescription) -> str:
    names = [method.name for method in description.methods]
    missing = f"no method 'forward', nor the pair 'prefill' and 'decode'; the file has: {', '.join(names) or 'none'}"
    return f"{missing}, which ExecuTorch's MultimodalRunner calls" if set(MULTIMODAL) <= set(names) else missing


def _constant_faults(description: ProgramDescription) -> Iterator[str]:
    """The runner reads each value as one scalar, the end-of-sequence ids as a list (get_llm_metadata, get_eos_ids)."""
    if description.constant(MAX_SEQ_LEN) is None:
        yield f"no constant method '{MAX_SEQ_LEN}': the runner refuses a file without it"
    for name in (MAX_SEQ_LEN, MAX_CONTEXT_LEN, *DEFAULT_FLAGS):
        values = description.constant(name)
        if values is not None and (len(values) != 1 or isinstance(values[0], str)):
            yield f"'{name}' returns {list(values)}; the runner takes one number"
    for value in description.constant(EOS_IDS) or ():
        if not isinstance(value, int):
            yield f"'{EOS_IDS}' returns {value!r} among its values; the runner takes integers"
    length = _number(description, MAX_SEQ_LEN, 1)
    if length < 1:
        yield f"'{MAX_SEQ_LEN}' is {length}; expected at least 1"


def _input_faults(method: MethodDescription, description: ProgramDescription) -> Iterator[str]:
    """Tokens, and with a cache the position: nothing else (IOManager::prepare_prefill, prepare_decode)."""
    count = len(method.inputs)
    cached = _flag(description, "use_kv_cache")
    if count not in (1, 2):
        yield (
            f"{method.name} has {count} inputs; the stock runner passes exactly two, tokens and position "
            "(cache tensors and masks may not be inputs)"
        )
        return
    if count == 1 and cached:
        yield f"{method.name} takes no position, but 'use_kv_cache' is true or absent: a step would see one token only"
    if count == 2 and not cached:
        yield f"{method.name} takes a position, but 'use_kv_cache' is false: a step would write all tokens once more"
    yield from _token_faults(method, description)
    if count == 2:
        yield from _position_faults(method)


def _token_faults(method: MethodDescription, description: ProgramDescription) -> Iterator[str]:
    tokens = method.inputs[0]
    if tokens.dtype != "int64" or len(tokens.shape) != 2 or tokens.shape[0] != 1:
        yield f"{method.name}: input 0 is {_text(tokens)}; the stock runner passes tokens as int64 [1, n]"
        return
    if method.name == "decode" or not _reads_in_one_call(description):
        if not tokens.dynamic and tokens.shape[1] != 1:
            yield f"{method.name}: takes exactly {tokens.shape[1]} tokens; the stock runner passes one at a time"
        return
    longest = _longest_chunk(description)
    if not tokens.dynamic:
        yield (
            f"{method.name}: takes exactly {tokens.shape[1]} tokens; with 'enable_dynamic_shape' the stock runner "
            "passes a prompt of any length in one call"
        )
    elif tokens.shape[1] < longest:
        yield (
            f"{method.name}: takes at most {tokens.shape[1]} tokens a call; the stock runner passes up to {longest} "
            f"(it cuts a prompt into pieces of '{MAX_SEQ_LEN}' tokens)"
        )


def _position_faults(method: MethodDescription) -> Iterator[str]:
    """One element: the start; more: one position a token (populate_start_pos_or_cache_position)."""
    position, tokens = method.inputs[1], method.inputs[0]
    if position.dtype != "int64" or len(position.shape) != 1:
        yield f"{method.name}: input 1 is {_text(position)}; the stock runner passes the position as int64 [1] or [n]"
    elif position.shape[0] > 1 and not position.dynamic and tokens.dynamic:
        yield (
            f"{method.name}: takes exactly {position.shape[0]} positions; declared with more than one element, "
            "the stock runner passes one position for each token"
        )


def _output_faults(method: MethodDescription, tokenizer_vocabulary: int | None) -> Iterator[str]:
    """One tensor of logits, of which the last row is read (TextDecoderRunner::step, sample_from_logits)."""
    if _chooses(method):
        yield (
            f"{method.name} gives the {method.outputs[0].shape[-1]} likeliest tokens and their logits (export.top_k); "
            "the stock runner chooses itself, and takes the logits of all tokens as the one output"
        )
        return
    if len(method.outputs) != 1:
        yield (
            f"{method.name} has {len(method.outputs)} outputs; the stock runner takes exactly one "
            "(cache tensors may not be outputs)"
        )
        return
    logits = method.outputs[0]
    if logits.dtype not in LOGIT_DTYPES:
        yield f"{method.name}: the output is {_text(logits)}; the stock runner takes {', '.join(LOGIT_DTYPES)}"
    if len(logits.shape) not in (2, 3) or logits.shape[0] != 1:
        yield f"{method.name}: the output is {_text(logits)}; the stock runner takes [1, n, V] or [1, V]"
    elif tokenizer_vocabulary is not None and logits.shape[-1] < tokenizer_vocabulary:
        yield (
            f"{method.name}: {logits.shape[-1]} logits for a tokenizer of {tokenizer_vocabulary} tokens; "
            "the stock runner reads as many logits as the tokenizer has tokens"
        )


def _chooses(method: MethodDescription) -> bool:
    """Whether the first outputs are float logits and as many int64 ids."""
    kinds = [(each.dtype, each.shape) for each in method.outputs[:2]]
    return len(kinds) == 2 and kinds[0][0] in LOGIT_DTYPES and kinds[1] == ("int64", kinds[0][1])


def _pair_faults(methods: list[MethodDescription]) -> Iterator[str]:
    """The runner's Module gives each method memory of its own (``share_memory_arenas`` is false)."""
    if len(methods) == 2 and all(len(method.inputs) == 2 for method in methods):
        yield (
            f"{methods[0].name} and decode: the stock runner generates with 'decode' wherever a file has it, and gives "
            f"each method a memory of its own: decode would not see the cache that {methods[0].name} wrote; "
            "leave 'decode' out, or give it another name"
        )


def _notes(description: ProgramDescription, methods: list[MethodDescription]) -> Iterator[str]:
    for name, remark in NOT_READ.items():
        if description.constant(name) is not None:
            yield f"'{name}' is not read: {remark}"
    if description.constant(EOS_IDS) is None:
        yield f"no '{EOS_IDS}': the runner stops at the tokenizer's own end token only"
    if not _reads_in_one_call(description):
        yield "'enable_dynamic_shape' is false or absent: the runner reads a prompt token by token"
    length = _number(description, MAX_SEQ_LEN, 0)
    if length < _number(description, MAX_CONTEXT_LEN, length):
        yield (
            f"'{MAX_SEQ_LEN}' is less than '{MAX_CONTEXT_LEN}': the runner takes the model for one with a sliding "
            "window and does not check that position and prompt fit into the cache"
        )
    if len(methods) == 1 and len(methods[0].inputs) == 1:
        yield "no position input: the runner passes the whole sequence at each step"
    yield from _runtime_notes(description)


def _runtime_notes(description: ProgramDescription) -> Iterator[str]:
    for prefix, library in _CUSTOM_LIBRARIES.items():
        names = [name for name in operators_required(description) if name.startswith(prefix)]
        if names:
            yield f"needs {', '.join(names)} from {library}"
    backends = backends_required(description)
    if backends:
        yield f"needs {', '.join(backends)} in the runtime"
    if description.external_data:
        yield "its weights lie in a .ptd file, which the app must pass as well"


def _reads_in_one_call(description: ProgramDescription) -> bool:
    return _flag(description, "enable_dynamic_shape") or not _flag(description, "use_kv_cache")


def _longest_chunk(description: ProgramDescription) -> int:
    """Tokens of the longest call: a prompt must be shorter than the context (TextLLMRunner::generate)."""
    length = _number(description, MAX_SEQ_LEN, 1)
    return min(length, _number(description, MAX_CONTEXT_LEN, length) - 1)


def _flag(description: ProgramDescription, name: str) -> bool:
    values = description.constant(name)
    return bool(values[0]) if values else DEFAULT_FLAGS[name]


def _number(description: ProgramDescription, name: str, default: int) -> int:
    values = description.constant(name)
    return int(values[0]) if values and not isinstance(values[0], str) else default


def _text(tensor: TensorDescription) -> str:
    return f"{tensor.dtype} [{', '.join(map(str, tensor.shape))}]"
