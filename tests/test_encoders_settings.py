"""Tasks without a cache, with nothing built: which task a model is of, what it ignores, what its check judges."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, BertConfig, LlamaConfig, ResNetConfig, ViTConfig

from pipeline.artifacts import Loaded
from pipeline.cases import identity_of, spread_rows
from pipeline.config import BuildSettings
from pipeline.load import load
from pipeline.tasks import TASKS
from pipeline.tasks.fill_mask import _rows
from pipeline.tasks.infer import infer_task
from pipeline.tasks.settings import refuse_idle, refuse_unmeasured
from pipeline.tasks.text_encoder import cases_of, longest_text
from runners.cases import GoldenCase
from runners.check import judged
from runners.check_cases import cases_repeat, replay_cases
from runners.check_limits import refuse_unmeasurable
from runners.check_render import show
from runners.check_report import CheckReport, Limits, QuantizedLimits
from runners.errors import UserError
from runners.goldens import Goldens
from runners.goldens import load as load_goldens
from runners.goldens import save as save_goldens
from runners.preprocessing import Pooling
from tests import tiny_encoders as tiny

MEAN = Pooling(mode="mean", normalize=False)


def settings_of(**sections: object) -> BuildSettings:
    return BuildSettings.model_validate({"name": "a", "model": {"source": "./a"}, **sections})


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("BertModel", "embedding"),
        ("ModernBertModel", "embedding"),
        ("AlbertForMaskedLM", "fill-mask"),
        ("ViTForImageClassification", "image-classification"),
        ("DeiTForImageClassificationWithTeacher", "image-classification"),
        ("LlamaForCausalLM", "text-generation"),
    ],
)
def test_the_architecture_names_the_task(architecture: str, task: str) -> None:
    assert infer_task(BertConfig(architectures=[architecture]), None) == task


def test_a_config_without_architecture_is_of_a_task_that_has_a_class_for_it() -> None:
    assert infer_task(ViTConfig(), None) == "image-classification"
    assert infer_task(ResNetConfig(), None) == "image-classification"
    assert infer_task(LlamaConfig(), None) == "text-generation"


@pytest.mark.parametrize("architecture", ["BertForQuestionAnswering", "ViTModel"])
def test_other_architectures_are_refused(architecture: str) -> None:
    with pytest.raises(UserError, match=f"the architecture {architecture} is not supported"):
        infer_task(BertConfig(architectures=[architecture]), None)


IDLE = {
    "cache.max_length": ("embedding", {"cache": {"max_length": 64}}),
    "check.chat": ("fill-mask", {"check": {"chat": True}}),
    "check.images": ("fill-mask", {"check": {"images": ["a.png"]}}),
    "check.perplexity": ("embedding", {"check": {"perplexity": {"text": "a.txt"}}}),
    "check.prompts": ("image-classification", {"check": {"prompts": ["a"]}}),
    "check.quantized.max_mean_kl": ("fill-mask", {"check": {"quantized": {"max_mean_kl": 1.0}}}),
    "check.quantized.min_cosine": ("fill-mask", {"check": {"quantized": {"min_cosine": 0.0}}}),
    "check.token_ids": ("text-generation", {"check": {"token_ids": [[1]]}}),
    "check.unquantized.min_equal_top1": ("embedding", {"check": {"unquantized": {"min_equal_top1": 1.0}}}),
    "export.max_length": ("text-generation", {"export": {"max_length": 8}}),
    "export.methods": ("embedding", {"export": {"methods": ["forward"]}}),
    "quantize.embedding": ("image-classification", {"quantize": {"embedding": "8w"}}),
    "quantize.lm_head": ("embedding", {"quantize": {"lm_head": "8da8w"}}),
}


@pytest.mark.parametrize(("key", "given"), IDLE.items(), ids=IDLE.keys())
def test_a_setting_that_a_task_does_not_read_is_refused(key: str, given: tuple[str, dict]) -> None:
    task, sections = given
    with pytest.raises(UserError, match=f"^{key}: has no effect on a model for {task}; remove it"):
        refuse_idle(settings_of(**sections), task, TASKS[task].settings)


@pytest.mark.parametrize("task", ["embedding", "fill-mask", "image-classification"])
def test_defaults_and_what_unsets_a_base_are_no_settings(task: str) -> None:
    refuse_idle(settings_of(), task, TASKS[task].settings)
    unset = {"perplexity": None, "long_prompt": None, "chat": False, "prompts": [], "quantized": {"max_mean_kl": None}}
    refuse_idle(settings_of(check=unset, quantize={"embedding": "none"}), task, TASKS[task].settings)


def test_limits_of_a_check_of_nothing_are_refused() -> None:
    check = settings_of(check={"unquantized": {"min_cosine": 0.9}}).check
    with pytest.raises(UserError, match=r"^check.unquantized.min_cosine: there is nothing to compare; give check.prom"):
        refuse_unmeasured(check)
    refuse_unmeasured(settings_of().check)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    source = tiny.save(tmp_path_factory.mktemp("models") / "bert", "BertForMaskedLM")
    return load(settings_of(model={"source": str(source)}).model)


def test_the_positions_of_padding_are_no_room_for_text() -> None:
    assert longest_text(tiny.model("BertModel"), None) == tiny.MAX
    assert longest_text(tiny.model("BertModel"), 7) == 7
    assert longest_text(tiny.model("RobertaModel"), None) == tiny.MAX - 2
    with pytest.raises(UserError, match=r"^export.max_length: 39 tokens exceed the 38 positions"):
        longest_text(tiny.model("RobertaModel"), 39)


def test_masked_places_are_recorded_and_others_where_there_are_none(loaded: Loaded) -> None:
    assert _rows(loaded)(torch.tensor([2, 4, 9, 4, 3])).tolist() == [1, 3]
    assert _rows(loaded)(torch.tensor([2, 9, 3])).tolist() == [0, 1, 2]
    assert _rows(replace(loaded, tokenizer=None))(torch.tensor([2, 4, 3])).tolist() == [0, 1, 2]
    spread = spread_rows(500).tolist()
    assert (spread[0], spread[-1], len(set(spread))) == (0, 499, 16)


@pytest.mark.parametrize(
    ("check", "message"),
    [
        ({"token_ids": [[1] * 41]}, r"^check.token_ids: entry 0 has 41 tokens; a call takes 1 to 40"),
        ({"token_ids": [[1], []]}, r"^check.token_ids: entry 1 has 0 tokens"),
        ({"token_ids": [[64]]}, r"^check.token_ids: entry 0 has the token 64; the model's vocabulary ends at 63"),
        ({"prompts": ["w0 " * 50]}, r"^check.prompts: entry 0 has 52 tokens"),
    ],
)
def test_texts_that_do_not_fit_are_refused(loaded: Loaded, check: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        cases_of(loaded, settings_of(check=check), _rows(loaded))


def test_another_text_or_length_is_another_recording(loaded: Loaded) -> None:
    def found(length: int | None, *prompts: str) -> str:
        check = {"prompts": prompts, "to_the_end": True}
        return identity_of(cases_of(loaded, settings_of(check=check, export={"max_length": length}), _rows(loaded)))

    assert found(None, "w0") == found(40, "w0")
    assert len({found(None, "w0"), found(None, "w1"), found(20, "w0"), found(None, "w0", "w0")}) == 4


class Table:
    """A toy program: hidden states or logits are rows of a table."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table, self.calls = table, 0

    def call(self, inputs: dict[str, torch.Tensor], method: str = "forward") -> dict[str, torch.Tensor]:
        self.calls += 1
        return {"out": self.table[inputs["tokens"]]}


class Forgetful(Table):
    """Its second call is not as its first."""

    def call(self, inputs: dict[str, torch.Tensor], method: str = "forward") -> dict[str, torch.Tensor]:
        return {"out": super().call(inputs)["out"] + self.calls}


TABLE = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))


def case(kind: str, name: str = "0", table: torch.Tensor = TABLE) -> GoldenCase:
    tokens, rows = torch.tensor([[1, 2, 3, 4]]), torch.tensor([0, 2, 3])
    wanted = table[tokens[0, rows]]
    return GoldenCase(name, "text", "forward", "out", kind, {"tokens": tokens}, rows, wanted, wanted.clone())


def report(program: Table, cases: list[GoldenCase], limits: QuantizedLimits, *, repeatable: bool = True) -> CheckReport:
    found = replay_cases(program, cases, MEAN, lambda message: None)
    empty = {"passed": False, "prompts": (), "perplexity": None, "kl_over_rounding": None, "violations": ()}
    return judged(
        CheckReport(**empty, repeatable=repeatable, limits_quantized=limits, limits_unquantized=Limits(), cases=found)
    )


STRICT = {
    "hidden": QuantizedLimits(max_output_difference=1e-9, min_cosine=0.9999999),
    "logits": QuantizedLimits(max_output_difference=1e-9, min_equal_top1=1, min_equal_top5=1),
}


@pytest.mark.parametrize("kind", ["hidden", "logits"])
def test_an_equal_program_passes_and_is_shown(kind: str) -> None:
    found = report(Table(TABLE), [case(kind)], STRICT[kind])
    assert found.passed, found.violations
    output = io.StringIO()
    show(found, Console(file=output, width=200))
    assert ("1 - cosine" in output.getvalue()) == (kind == "hidden")
    assert ("3/3" in output.getvalue()) == (kind == "logits")
    assert CheckReport.model_validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize(
    ("kind", "limit", "value"),
    [
        ("hidden", "max_output_difference", 1e-3),
        ("hidden", "min_cosine", 0.999),
        ("logits", "min_equal_top1", 0.7),
        ("logits", "min_equal_top5", 0.7),
    ],
)
def test_a_wrong_program_breaks_each_limit(kind: str, limit: str, value: float) -> None:
    wrong = TABLE.clone()
    wrong[1] = -wrong[1]  # the first of three recorded rows
    limits = QuantizedLimits(**{limit: value})
    found = report(Table(wrong), [case(kind)], limits)
    assert [violation.rule for violation in found.violations] == [limit]
    assert report(Table(TABLE), [case(kind)], limits).passed
    if kind == "logits":
        assert found.violations[0].value == pytest.approx(2 / 3)
        assert report(Table(wrong), [case(kind)], QuantizedLimits(**{limit: 0.6})).passed


def test_nan_fails_whatever_the_limits_are() -> None:
    found = report(Table(TABLE * torch.nan), [case("hidden")], QuantizedLimits())
    assert [violation.rule for violation in found.violations] == ["finite"]


def test_a_program_that_keeps_something_is_found() -> None:
    assert cases_repeat(Table(TABLE), [case("hidden")])
    assert not cases_repeat(Forgetful(TABLE), [case("hidden")])
    found = report(Table(TABLE), [case("hidden")], QuantizedLimits(), repeatable=False)
    assert [violation.rule for violation in found.violations] == ["repeatable"]


@pytest.mark.parametrize(
    ("kind", "limit", "lacking"),
    [
        (None, "max_output_difference", "outputs"),
        ("hidden", "min_equal_top1", "logits"),
        ("hidden", "min_equal_top5", "logits"),
        ("logits", "min_cosine", "hidden states"),
    ],
)
def test_a_limit_that_nothing_measures_is_refused(kind: str | None, limit: str, lacking: str) -> None:
    goldens = Goldens((), None, (case(kind),) if kind is not None else ())
    with pytest.raises(UserError, match=f"{limit} is set, but the goldens hold no case with {lacking}"):
        refuse_unmeasurable(goldens, QuantizedLimits(), Limits(**{limit: 0.5}))
    for name, strict in STRICT.items():
        refuse_unmeasurable(Goldens((), None, (case(name),)), strict, Limits())


def test_an_output_of_another_shape_is_refused() -> None:
    with pytest.raises(UserError, match=r"case 0: the program's out is \[1, 4, 11\], the goldens hold \[3, 12\]"):
        report(Table(TABLE[:, :11]), [case("hidden")], QuantizedLimits())


def test_cases_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "goldens.safetensors"
    save_goldens(Goldens((), None, (case("logits"), case("logits", "padded"))), path)
    found = load_goldens(path)
    assert [each.name for each in found.cases] == ["0", "padded"]
    for each in found.cases:
        assert (each.kind, each.method, each.output, each.text) == ("logits", "forward", "out", "text")
        assert torch.equal(each.inputs["tokens"], case("logits").inputs["tokens"])
        assert torch.equal(each.rows, case("logits").rows)
        assert torch.equal(each.quantized, case("logits").quantized)
    with pytest.raises(ValueError, match="distinct names"):
        save_goldens(Goldens((), None, (case("logits"), case("logits"))), path)


def test_a_preprocessor_of_another_size_than_the_model_is_refused(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "vit", "ViTForImageClassification")
    config = AutoConfig.from_pretrained(folder)
    extras = TASKS["image-classification"].extras(folder, config)
    assert extras.labels is not None
    assert len(extras.labels) == tiny.LABELS
    config.image_size = 64
    with pytest.raises(UserError, match=r"gives images of 32 x 32 pixels, its config says 64 x 64"):
        TASKS["image-classification"].extras(folder, config)
