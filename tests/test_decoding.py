"""How an answer begins and is limited, recordings in pieces, and logits of the last token alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import JsonValue
from torch import nn
from torch.export import Dim, ExportedProgram
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
from torchao.quantization.granularity import PerAxis
from transformers import BartConfig, PreTrainedConfig

from pipeline.decoding import read_decoding
from pipeline.passes.last_logits import last_logits
from runners.audio import log_mel
from runners.encoder_decoder import SUPPRESSED, suppress
from runners.errors import UserError
from runners.manifest import Decoding
from runners.preprocessing import LogMel, Waveform
from runners.speech import pieces
from runners.wav import Audio

MEL = LogMel(sampling_rate=16_000, feature_size=8, n_fft=400, hop_length=160, n_samples=16_000)
SAMPLES = Waveform(sampling_rate=16_000, normalize=False)


def read(folder: Path, config: PreTrainedConfig | None = None, **generation: JsonValue) -> Decoding:
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_decoding(folder, config or PreTrainedConfig())


LANGUAGES = {"<|en|>": 11, "<|de|>": 12}
TASKS = {"transcribe": 21, "translate": 22}


@pytest.mark.parametrize(
    ("generation", "prompt"),
    [
        ({"decoder_start_token_id": 1}, [1]),
        ({"decoder_start_token_id": 1, "no_timestamps_token_id": 9}, [1, 9]),
        ({"decoder_start_token_id": 1, "forced_decoder_ids": [[2, 7], [1, 6]], "no_timestamps_token_id": 7}, [1, 6, 7]),
        ({"decoder_start_token_id": 1, "lang_to_id": LANGUAGES, "task_to_id": TASKS}, [1, 11, 21]),
        (
            {"decoder_start_token_id": 1, "lang_to_id": LANGUAGES, "task_to_id": TASKS, "language": "<|de|>"}
            | {"task": "translate", "no_timestamps_token_id": 9, "forced_decoder_ids": [[1, None], [2, 21]]},
            [1, 12, 22, 9],
        ),
        ({"decoder_start_token_id": 1, "forced_bos_token_id": 5}, [1, 5]),
        ({"bos_token_id": 4}, [4]),
    ],
)
def test_an_answer_begins_as_generate_begins_it(tmp_path: Path, generation: dict, prompt: list[int]) -> None:
    assert read(tmp_path, **generation).prompt == prompt


def test_tokens_that_are_never_written_come_from_three_settings(tmp_path: Path) -> None:
    settings = {"suppress_tokens": [9, 3, -1], "begin_suppress_tokens": [8, 2], "bad_words_ids": [[4], [5, 6]]}
    found = read(tmp_path, decoder_start_token_id=1, **settings)
    assert (found.suppressed, found.suppressed_first) == ([3, 4, 9], [2, 8])


def test_without_a_generation_config_the_models_own_says_it(tmp_path: Path) -> None:
    assert read_decoding(tmp_path, BartConfig(decoder_start_token_id=6)).prompt[0] == 6
    assert read_decoding(None, BartConfig(decoder_start_token_id=6)).prompt[0] == 6


def test_a_model_that_names_no_first_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="names a decoder_start_token_id, with which an answer begins; add it"):
        read(tmp_path)


def test_a_damaged_generation_config_is_refused_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match=r"generation_config\.json: cannot be read"):
        read_decoding(tmp_path, BartConfig())


def test_suppressed_tokens_lose_and_the_others_stay() -> None:
    decoding = Decoding(prompt=[0], suppressed=[1], suppressed_first=[3])
    assert suppress(torch.arange(5.0), decoding, first=True).tolist() == [0, SUPPRESSED, 2, SUPPRESSED, 4]
    assert suppress(torch.arange(5.0), decoding, first=False).tolist() == [0, SUPPRESSED, 2, 3, 4]
    nothing = Decoding(prompt=[0], suppressed=[], suppressed_first=[])
    assert suppress(torch.arange(2.0), nothing, first=True).tolist() == [0, 1]


# Pieces of a recording


def test_a_recording_is_cut_into_pieces_of_what_the_model_hears() -> None:
    samples = np.random.default_rng(0).normal(size=40_000).astype(np.float32)
    found = pieces(Audio(samples, 16_000), MEL, 1, 1)
    assert len(found) == 3
    for place, piece in enumerate(found):
        assert torch.equal(piece, log_mel(samples[16_000 * place : 16_000 * (place + 1)], MEL))


def test_samples_are_cut_at_the_longest_input_and_padded_to_the_shortest() -> None:
    samples = np.arange(1, 26, dtype=np.float32)
    found = pieces(Audio(samples, 16_000), SAMPLES, shortest=8, longest=10)
    assert [piece.shape[1] for piece in found] == [10, 10, 8]
    assert found[2].flatten().tolist() == [21, 22, 23, 24, 25, 0, 0, 0]


def test_an_empty_recording_is_one_piece_of_silence_and_another_rate_is_resampled() -> None:
    (silence,) = pieces(Audio(np.zeros(0, np.float32), 16_000), SAMPLES, shortest=8, longest=10)
    assert silence.tolist() == [[0.0] * 8]
    assert [p.shape[1] for p in pieces(Audio(np.zeros(100, np.float32), 8_000), SAMPLES, 1, 1000)] == [200]


# Logits of the last token alone


class Head(nn.Module):
    """An output layer as BART has one: a bias after it, or something that mixes tokens."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.linear, self.mixes = nn.Linear(4, 6, bias=False), mixes
        self.register_buffer("bias", torch.randn(1, 6))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.linear(hidden * 2) * 0.5 + self.bias
        return logits.cumsum(1) if self.mixes else logits


def exported(module: nn.Module, width: int = 4) -> ExportedProgram:
    shape = {"hidden": {1: Dim("tokens", min=1, max=9)}}
    program = torch.export.export(module.eval(), (torch.zeros(1, 3, width),), dynamic_shapes=shape)
    return program.run_decompositions({})


@pytest.mark.export
def test_the_last_tokens_logits_are_computed_alone() -> None:
    module = Head()
    program = last_logits(exported(module))
    (linear,) = program.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert linear.meta["val"].shape == (1, 1, 6)
    for tokens in (1, 2, 9):
        hidden = torch.randn(1, tokens, 4)
        torch.testing.assert_close(program.module()(hidden), module(hidden)[:, -1:])


@pytest.mark.export
def test_a_quantized_output_layer_rounds_the_last_token_alone() -> None:
    module = Head()
    module.linear = nn.Linear(32, 6, bias=False)
    quantize_(module, Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int8, weight_granularity=PerAxis(0)))
    program = last_logits(exported(module, 32))
    hidden = torch.randn(1, 5, 32)
    torch.testing.assert_close(program.module()(hidden), module(hidden)[:, -1:])
    rounded = [node for node in program.graph.nodes if str(node.target) == "torchao.quantize_affine.default"]
    assert [node.meta["val"].shape for node in rounded if node.meta["val"].dim() == 3] == [(1, 1, 32)]


@pytest.mark.export
def test_logits_that_are_not_made_token_by_token_are_refused() -> None:
    with pytest.raises(UserError, match=r"export\.logits: last needs logits that a linear layer makes.*cumsum"):
        last_logits(exported(Head(mixes=True)))
