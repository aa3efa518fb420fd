"""Encoder-decoder models from a folder to a checked package, and what the package's session does: random models."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from transformers import PreTrainedModel
from typer.testing import CliRunner

from pipeline.artifacts import Quantized
from pipeline.build import BuildOptions, build
from pipeline.config import CacheSettings, ExportSettings, ModelSettings
from pipeline.config_reader import read
from pipeline.export import export
from pipeline.goldens import Prompt
from pipeline.load import load
from pipeline.record_answers import Answers, greedy_answer
from pipeline.stage_cache import StageCache
from pipeline.stages import Stages
from pipeline.tasks import TASKS
from runners.check_report import read_report
from runners.cli import app
from runners.encoder_decoder import MASK, SUPPRESSED, Seq2SeqSession
from runners.errors import UserError
from runners.manifest import Manifest
from runners.package import open_package
from runners.pte import read_program
from runners.session import ContextEndError, Session
from runners.speech import pieces
from runners.wav import Audio
from tests import tiny_seq2seq as models

pytestmark = [pytest.mark.export, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]

STEPS, CHUNK, LONGEST = 24, 8, {"t5": 40, "moonshine": 32_000}
TEXTS = ["The quick brown fox", "Every morning the baker opened her shop"]
EXACT = {"min_equal_prompts": 1.0, "max_logit_difference": 2e-3}


class Built:
    """A family's folder, and its package; each is made once."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family, self.folder = family, folder
        models.save(family, folder / "model")
        for number, seconds in enumerate((0.8, 0.5)):
            models.write_wav(folder / f"{number}.wav", models.tone(seconds, number))

    @property
    def hears(self) -> bool:
        return self.family in models.HEARING

    def build(self, name: str = "plain", **sections: object) -> Path:
        """Build a package; ``sections`` replace those of the configuration."""
        check = {"audio": ["0.wav", "1.wav"]} if self.hears else {"prompts": TEXTS}
        longest = {"max_encoder_length": LONGEST[self.family]} if self.family in LONGEST else {}
        content = {
            "name": name,
            "model": {"source": "./model"},
            "cache": {"max_length": models.LENGTH, **longest},
            "export": {"max_prefill_length": CHUNK},
            "check": {"steps": STEPS, "quantized": EXACT, "unquantized": EXACT, **check},
            "package": {"directory": str(self.folder / "dist")},
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**content, **sections}))
        stages = Stages(Console(quiet=True))
        return build(read(path, []), BuildOptions(), stages, StageCache(None)).path

    @cached_property
    def package(self) -> Path:
        return self.build()

    @property
    def manifest(self) -> Manifest:
        return open_package(self.package).manifest

    @cached_property
    def model(self) -> PreTrainedModel:
        return load(ModelSettings(source=str(self.folder / "model"))).model

    @cached_property
    def session(self) -> Seq2SeqSession:
        return Seq2SeqSession.open(open_package(self.package), threads=1)

    def inputs(self, seed: int) -> Mapping[str, torch.Tensor]:
        """An input of the encoder; each seed has another length, where the model takes any."""
        spec = self.manifest.methods["encode"].inputs[0]
        if spec.name == "tokens":
            generator = torch.Generator().manual_seed(seed)
            return {"tokens": torch.randint(3, models.VOCABULARY, (1, 7 + 12 * seed), generator=generator)}
        assert self.manifest.audio is not None
        audio = Audio(models.tone(0.4 + 0.7 * seed, seed), models.RATE)
        return {spec.name: pieces(audio, self.manifest.audio, spec.min_shape[-1], spec.shape[-1])[0]}

    def eager(self, inputs: Mapping[str, torch.Tensor], begin: list[int], steps: int = STEPS) -> torch.Tensor:
        """Eager PyTorch's logits of greedy steps, float32 [steps, V]."""
        assert self.manifest.decoding is not None
        how = Answers(self.model.main_input_name, self.manifest.decoding, steps, frozenset())
        return greedy_answer(self.model, Prompt("", "", torch.tensor(begin), encoder=inputs), how)


@pytest.fixture(scope="module", params=models.MODELS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(request.param, tmp_path_factory.mktemp(request.param))


def answer(session: Seq2SeqSession, begin: list[int], steps: int = STEPS) -> torch.Tensor:
    """The program's logits of greedy steps, float32 [steps, V]."""
    rows = [session.prefill(begin).clone()]
    for _ in range(steps - 1):
        rows.append(session.step(int(rows[-1].argmax())).clone())
    return torch.stack(rows)


def assert_equal_answers(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.argmax(-1).tolist() == expected.argmax(-1).tolist()
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)


def test_the_build_checks_the_package_against_eager(built: Built) -> None:
    report = read_report(built.package / "report" / "check.json")
    assert report.passed
    assert report.repeatable
    assert len(report.prompts) == 2
    assert all(prompt.quantized.tokens_equal and prompt.quantized.whole_vocabulary for prompt in report.prompts)
    assert CliRunner().invoke(app, ["check", str(built.package)]).exit_code == 0


@pytest.mark.parametrize("length", [1, 5, 17])
@pytest.mark.parametrize("seed", [0, 1])
def test_steps_after_beginnings_of_any_length_equal_eager(built: Built, length: int, seed: int) -> None:
    begin = list(range(3, 3 + length))
    inputs = built.inputs(seed)
    built.session.encode(inputs)
    assert_equal_answers(answer(built.session, begin), built.eager(inputs, begin))


def test_a_second_input_on_a_loaded_program_equals_a_fresh_load(built: Built) -> None:
    first, second = built.inputs(1), built.inputs(0)  # the second is shorter, where the length is free
    built.session.encode(first)
    answer(built.session, [3, 4, 5])
    built.session.encode(second)
    again = answer(built.session, [6])
    fresh = Seq2SeqSession.open(open_package(built.package), threads=1)
    fresh.encode(second)
    assert torch.equal(again, answer(fresh, [6]))


def test_another_answer_to_the_same_input_needs_no_second_encode(built: Built) -> None:
    built.session.encode(built.inputs(0))
    first = answer(built.session, [3], 4)
    built.session.reset()
    answer(built.session, [7, 8], 4)
    built.session.reset()
    assert torch.equal(answer(built.session, [3], 4), first)


def test_the_caches_end_is_reached_and_not_passed(built: Built) -> None:
    inputs, begin = built.inputs(1), list(range(3, 20))
    steps = models.LENGTH - len(begin) + 1
    built.session.encode(inputs)
    assert_equal_answers(answer(built.session, begin, steps), built.eager(inputs, begin, steps))
    assert built.session.position == models.LENGTH
    with pytest.raises(ContextEndError):
        built.session.step(3)
    with pytest.raises(UserError, match=r"1 tokens do not fit: the decoder of 'plain' holds 48, 48 of them used"):
        built.session.prefill([3])


def test_the_longest_input_fits_and_no_longer_one(built: Built) -> None:
    spec = built.manifest.methods["encode"].inputs[0]
    dtype = getattr(torch, spec.dtype)
    longest = {spec.name: torch.ones(spec.shape, dtype=dtype) * 3}
    built.session.encode(longest)
    assert_equal_answers(answer(built.session, [3], 4), built.eager(longest, [3], 4))
    with pytest.raises(UserError, match=f"input {spec.name} is"):
        built.session.encode({spec.name: torch.ones(*spec.shape[:-1], spec.shape[-1] + 1, dtype=dtype)})


def test_the_manifest_lists_the_encoders_keys_once_and_the_methods_share_them(built: Built) -> None:
    cache = built.manifest.cache
    assert cache is not None
    assert {tensor.kind for tensor in cache.tensors} == {"full", "cross"}
    assert len(cache.tensors) == 8  # two decoder layers, keys and values, of the decoder and of the encoder
    encode, decode = built.manifest.methods["encode"], built.manifest.methods["decode"]
    positions = {tensor.shape[2] for tensor in cache.tensors if tensor.kind == "cross"}
    assert positions == {encode.outputs[0].shape[1]}
    masks = [spec.shape for spec in decode.inputs if spec.name == MASK]
    assert masks == ([] if built.family == "whisper" else [[1, *positions]])
    by_kind = {kind: sum(t.bytes for t in cache.tensors if t.kind == kind) for kind in ("full", "cross")}
    shared = {m.name: m.planned_bytes[-1] for m in read_program(built.package / "model.pte").methods}
    assert by_kind["full"] + by_kind["cross"] <= shared["encode"] == shared["decode"] < 2 * cache.bytes


def test_decode_copies_no_key_of_the_encoder(built: Built) -> None:
    left = {operator.name for operator in built.manifest.methods["decode"].delegation.undelegated}
    assert not left & {"aten::copy_", "aten::copy.out"}


def test_an_answer_begins_and_is_limited_as_the_generation_config_says(built: Built) -> None:
    decoding = built.manifest.decoding
    assert decoding is not None
    expected = {
        "whisper": ([1], [5, 6], [2, 7]),
        "moonshine": ([1], [], []),
        "t5": ([0], [], []),
        "bart": ([1, 3], [], []),
        "marian": ([1], [0], []),
    }
    assert (decoding.prompt, decoding.suppressed, decoding.suppressed_first) == expected[built.family]
    built.session.encode(built.inputs(0))
    first, second = answer(built.session, decoding.prompt, 2)
    assert (first == SUPPRESSED).nonzero().flatten().tolist() == sorted(decoding.suppressed + decoding.suppressed_first)
    assert (second == SUPPRESSED).nonzero().flatten().tolist() == decoding.suppressed


def test_answers_are_those_of_transformers_generate(built: Built) -> None:
    """An oracle that shares no code with this project's own greedy loop."""
    if built.family == "whisper":
        pytest.skip("its generate is made for recordings of 30 s: the test of the real model compares with that")
    decoding, inputs = built.manifest.decoding, built.inputs(1)
    assert decoding is not None
    argument = {built.model.main_input_name: next(iter(inputs.values()))}
    made = built.model.generate(**argument, max_new_tokens=12, do_sample=False)[0].tolist()
    built.session.encode(inputs)
    ours = decoding.prompt + answer(built.session, decoding.prompt, 12).argmax(-1).tolist()
    assert len(made) > 2
    assert made[:-1] == ours[: len(made) - 1]  # of some models the last one is made to end the answer


def test_a_prompt_needs_an_input_first(built: Built) -> None:
    session = Seq2SeqSession.open(open_package(built.package), threads=1)
    with pytest.raises(UserError, match="nothing was encoded yet"):
        session.prefill([3])
    session.encode(built.inputs(0))
    with pytest.raises(UserError, match="token id 300 lies outside"):
        session.prefill([300])
    with pytest.raises(UserError, match="method encode takes"):
        session.encode({"strange": torch.zeros(1)})


def test_the_session_of_decoder_models_refuses_the_package(built: Built) -> None:
    with pytest.raises(UserError, match=r"cannot generate text.*the package has (encode, decode|decode, encode)"):
        Session.open(open_package(built.package))


def test_run_writes_the_answer(built: Built) -> None:
    given = ["--audio", str(built.folder / "0.wav")] if built.hears else [TEXTS[0]]
    done = CliRunner().invoke(app, ["run", str(built.package), *given, "--max-new-tokens", "6"], catch_exceptions=False)
    assert done.exit_code == 0
    assert done.stdout.endswith("\n")
    other = [TEXTS[0]] if built.hears else ["--audio", str(built.folder / "0.wav")]
    with pytest.raises(UserError, match="transcribes recordings" if built.hears else "takes text"):
        CliRunner().invoke(app, ["run", str(built.package), *other], catch_exceptions=False)


# What is refused before anything is built


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"cache": {"max_length": 49}}, r"cache\.max_length: 49 tokens exceed the 48 positions that the decoder was"),
        ({"cache": {"placement": "io"}}, r"cache\.placement: has no effect on a model for text2text"),
        ({"cache": {"max_encoder_length": 49}}, r"cache\.max_encoder_length: 49 tokens exceed the 48 positions"),
        ({"export": {"methods": ["forward", "decode"]}}, r"export\.methods: has no effect on a model for text2text"),
        ({"export": {"attention": "custom"}}, r"export\.attention: custom is causal by position"),
        ({"check": {"prompts": ["a"], "steps": 48}}, r"check\.steps: 2 tokens that an answer begins with and 48 steps"),
        ({"check": {"prompts": ["word " * 60]}}, r"check\.prompts: entry 0 has \d+ tokens; the encoder takes 1 to 48"),
        ({"check": {"audio": ["0.wav"]}}, r"check\.audio: has no effect on a model for text2text"),
        (
            {"quantize": {"linear": "8da4w"}},
            r"quantize\.scales: imatrix runs tokens through",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, sections: dict[str, object], message: str) -> None:
    plain = {"cache": {}, "export": {}, "check": {"steps": 4}, "quantize": {}}
    with pytest.raises(UserError, match=message):
        Built("bart", tmp_path).build(**{**plain, **sections})


def test_whispers_input_is_fixed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cache\.max_encoder_length: the model hears 1 s at a time"):
        Built("whisper", tmp_path).build(cache={"max_encoder_length": 20})


# Quantized


@pytest.mark.parametrize("family", ["whisper", "t5"])
def test_a_quantized_package_is_as_close_to_eager_as_rounding_lets_it(tmp_path: Path, family: str) -> None:
    made = Built(family, tmp_path)
    check = {"audio": ["0.wav", "1.wav"]} if made.hears else {"prompts": TEXTS}
    package = made.build(quantize={"linear": "8da8w"}, check={"steps": 8, **check})
    report = read_report(package / "report" / "check.json")
    assert all(prompt.finite and prompt.rounding is not None for prompt in report.prompts)
    assert all(prompt.quantized.equal_steps >= 7 for prompt in report.prompts)
    manifest = open_package(package).manifest
    assert manifest.quantization["quantize.linear"].startswith("8da8w")
    assert (package / "model.pte").stat().st_size < (made.build("plain") / "model.pte").stat().st_size


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_a_decoder_may_take_one_token_a_call(family: str) -> None:
    task, settings = TASKS["text2text"], ExportSettings(max_prefill_length=1)
    model = models.MODELS[family]().eval().requires_grad_(False)
    registered = task.register(Quantized(model, {}), CacheSettings(max_length=16, max_encoder_length=12), settings)
    exported = export(registered, task.plan(registered, settings), {})
    signature = exported.facts.signatures["decode"]
    assert signature.inputs[0].shape == [1, 1]
    assert signature.outputs[0].shape == [1, 1, models.VOCABULARY]
