"""Models without a cache, built whole from tiny random ones: the program says what eager PyTorch says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from typer.testing import CliRunner

from pipeline.build import BuildOptions, build
from pipeline.config_reader import read
from pipeline.stage_cache import StageCache
from pipeline.stages import Stages
from runners.caller import Caller, text_inputs
from runners.check_command import command as check
from runners.check_report import read_report
from runners.cli import app
from runners.encode import embed
from runners.errors import CheckFailedError, UserError
from runners.package import Package, open_package
from tests import tiny_encoders as tiny

pytestmark = [pytest.mark.export, pytest.mark.filterwarnings("ignore")]

TEXT_MODELS = [name for name in tiny.MODELS if "Image" not in name]
VISION_MODELS = [name for name in tiny.MODELS if "Image" in name]
CLOSE = 2e-5  # float32, values of about 1


class Shop:
    """Builds a package of each model once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._built: dict[str, Package] = {}
        self.image = tiny.save_image(folder / "noise.png")

    def config(self, name: str, architecture: str, check: dict[str, object], **sections: object) -> Path:
        source = self.folder / architecture
        if not source.exists():
            tiny.save(source, architecture)
        content = {
            "name": name,
            "model": {"source": str(source)},
            "check": check,
            "package": {"directory": str(self.folder / "dist")},
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**content, **sections}))
        return path

    def build(self, path: Path) -> Package:
        written = build(read(path), BuildOptions(), Stages(Console(quiet=True)), StageCache(self.folder / "cache"))
        return open_package(written.path)

    def __getitem__(self, architecture: str) -> Package:
        if architecture not in self._built:
            given = {"images": ["noise.png"]} if architecture in VISION_MODELS else texts()
            limits = {"max_output_difference": CLOSE, **exact_order(architecture)}
            path = self.config(architecture.lower(), architecture, {**given, "quantized": limits})
            self._built[architecture] = self.build(path)
        return self._built[architecture]


def texts() -> dict[str, object]:
    return {"prompts": tiny.TEXTS, "token_ids": [[2, 5, 6, 7, 3]], "to_the_end": True}


def exact_order(architecture: str) -> dict[str, float]:
    is_bare = architecture in ("BertModel", "ModernBertModel", "RobertaModel")
    return {"min_cosine": 0.99999} if is_bare else {"min_equal_top1": 1.0, "min_equal_top5": 1.0}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    return Shop(tmp_path_factory.mktemp("encoders"))


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["run", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def ids_of(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(5, tiny.VOCABULARY, (length,), generator=generator).tolist()


def eager(architecture: str, **inputs: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        output = tiny.model(architecture)(**inputs)
    return output.logits if "logits" in output else output.last_hidden_state


@pytest.mark.parametrize("architecture", TEXT_MODELS)
def test_a_text_of_any_length_is_as_eager_says(shop: Shop, architecture: str) -> None:
    package = shop[architecture]
    (output,) = package.manifest.methods["forward"].outputs
    longest = tiny.MAX - (2 if architecture == "RobertaModel" else 0)
    assert package.manifest.methods["forward"].inputs[0].shape == [1, longest]
    assert package.manifest.cache is None
    caller = Caller.open(package, 1)
    for length in (1, 5, 17, longest):
        ids = ids_of(length)
        wanted = eager(architecture, input_ids=torch.tensor([ids]))
        torch.testing.assert_close(caller.call(text_inputs(ids))[output.name], wanted, atol=CLOSE, rtol=0)
    with pytest.raises(UserError, match=rf"tokens is int64 \[1, {longest + 1}\]; the program takes int64 \[1, 1 to"):
        caller.call(text_inputs(ids_of(longest + 1)))


@pytest.mark.parametrize("architecture", TEXT_MODELS)
def test_padding_changes_nothing(shop: Shop, architecture: str) -> None:
    package = shop[architecture]
    (output,) = package.manifest.methods["forward"].outputs
    ids, padding = ids_of(9), int(tiny.model(architecture).config.pad_token_id or 0)
    caller = Caller.open(package, 1)
    alone = caller.call(text_inputs(ids))[output.name]
    padded = text_inputs([*ids, *[padding] * 8])
    padded["attention_mask"][0, 9:] = 0
    torch.testing.assert_close(caller.call(padded)[output.name][:, :9], alone, atol=CLOSE, rtol=0)
    padded["attention_mask"][0, 9:] = 1
    unmasked = caller.call(padded)[output.name][:, :9]
    assert (unmasked - alone).abs().max() > 100 * CLOSE, "the mask is not read"


@pytest.mark.parametrize("architecture", VISION_MODELS)
def test_an_image_is_as_eager_says(shop: Shop, architecture: str) -> None:
    package = shop[architecture]
    assert package.manifest.labels == [f"LABEL_{number}" for number in range(tiny.LABELS)]
    pixels = torch.randn(1, 3, tiny.PIXELS, tiny.PIXELS, generator=torch.Generator().manual_seed(3))
    logits = Caller.open(package, 1).call({"pixels": pixels})["logits"]
    torch.testing.assert_close(logits, eager(architecture, pixel_values=pixels), atol=CLOSE, rtol=0)
    guesses = json.loads(run(package.path, "--image", shop.image, "--json"))
    assert len(guesses) == 5
    assert guesses[0]["probability"] >= guesses[1]["probability"]
    assert [case.name for case in read_report(package.path / "report/check.json").cases] == [
        "0",
        "random 0",
        "random 1",
    ]


def test_an_embedding_is_the_mean_of_the_states(shop: Shop) -> None:
    package = shop["BertModel"]
    ids = [2, 5, 6, 3]
    wanted = eager("BertModel", input_ids=torch.tensor([ids]))[0].mean(0)
    torch.testing.assert_close(embed(Caller.open(package, 1), ids), wanted, atol=CLOSE, rtol=0)
    printed = json.loads(run(package.path, "w0 w1", "--json"))
    assert printed["tokens"] == 4
    torch.testing.assert_close(torch.tensor(printed["embedding"]), wanted, atol=CLOSE, rtol=0)
    assert run(package.path, "w0 w1").startswith("32 dimensions, length ")


def test_a_mask_is_filled_as_eager_fills_it(shop: Shop) -> None:
    package = shop["BertForMaskedLM"]
    ids = torch.tensor([[2, 5, 4, 6, 4, 3]])
    best = eager("BertForMaskedLM", input_ids=ids)[0, [2, 4]].softmax(-1).topk(5)
    masks = json.loads(run(package.path, "w0 [MASK] w1 [MASK]", "--json"))
    assert [mask["position"] for mask in masks] == [2, 4]
    assert [[guess["id"] for guess in mask["guesses"]] for mask in masks] == best.indices.tolist()
    with pytest.raises(UserError, match=r"no mask to fill: put \[MASK\]"):
        run(package.path, "w0")


def test_the_check_is_replayed_and_can_fail(shop: Shop, tmp_path: Path) -> None:
    package = shop["AlbertForMaskedLM"]
    check(package.path, threads=1, json=tmp_path / "report.json")
    cases = {case.name: case for case in read_report(tmp_path / "report.json").cases}
    assert set(cases) == {"0", "1", "2", "ids 0", "to_the_end", "padded"}
    assert cases["2"].quantized.rows == 2  # its masks
    assert cases["to_the_end"].inputs["tokens"] == [1, tiny.MAX]
    assert cases["padded"].inputs["tokens"] == [1, 3 + 7]
    strict = {**texts(), "quantized": {"max_output_difference": 1e-12}}
    path = shop.config("strict", "AlbertForMaskedLM", strict)
    with pytest.raises(CheckFailedError, match=r"case 0: max \|Δoutput\| against quantized is .*at most 1e-12 allowed"):
        shop.build(path)
    assert not (shop.folder / "dist/strict").exists()


@pytest.mark.parametrize("architecture", ["BertModel", "ViTForImageClassification"])
def test_eight_bits_are_close(shop: Shop, architecture: str) -> None:
    given = {"images": ["noise.png"]} if architecture in VISION_MODELS else texts()
    path = shop.config(f"{architecture.lower()}_8", architecture, given, quantize={"linear": "8da8w"})
    package = shop.build(path)
    cases = read_report(package.path / "report/check.json").cases
    assert any(case.unquantized.max_output_difference > CLOSE for case in cases), "nothing was quantized"
    for case in cases:
        assert case.quantized.mean_output_difference < case.unquantized.mean_output_difference
        assert case.unquantized.cosine is None or case.unquantized.cosine > 0.99
    assert package.program_path.stat().st_size < shop[architecture].program_path.stat().st_size


def test_a_model_without_tokens_is_described(shop: Shop) -> None:
    shown = CliRunner().invoke(app, ["inspect", str(shop["ViTForImageClassification"].path)])
    assert shown.exit_code == 0
    assert "image-classification" in shown.stdout
    assert "vocabulary" not in shown.stdout


def test_options_without_effect_are_refused(shop: Shop) -> None:
    with pytest.raises(UserError, match="--temperature: no effect on package 'bertmodel'"):
        run(shop["BertModel"].path, "w0", "--temperature", "1")
    with pytest.raises(UserError, match=r"takes a text, and no --image"):
        run(shop["BertModel"].path, "--image", shop.image)
    with pytest.raises(UserError, match=r"classifies images: give --image FILE"):
        run(shop["ViTForImageClassification"].path, "w0")


@pytest.mark.parametrize(("architecture", "workloads"), [("BertModel", {"8 tokens"}), (VISION_MODELS[0], {"1 image"})])
def test_calls_are_measured(shop: Shop, tmp_path: Path, architecture: str, workloads: set[str]) -> None:
    path = str(shop[architecture].path)
    report = tmp_path / "bench.json"
    arguments = ["bench", path, "--against", path, "--trials", "2", "--json", str(report)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    first, second = json.loads(report.read_text())["packages"]
    assert set(first["seconds"]) == set(second["seconds"]) == workloads
    assert all(found["n"] == 2 and found["median"] > 0 for found in first["seconds"].values())


def test_a_model_without_a_tokenizer_takes_token_ids(shop: Shop, tmp_path: Path) -> None:
    source = tiny.save(tmp_path / "model", "BertForMaskedLM", with_tokenizer=False)
    model = {"source": str(source)}
    package = shop.build(shop.config("bare", "BertForMaskedLM", {"token_ids": [[2, 4, 3]]}, model=model))
    assert package.manifest.tokenizer is None
    assert read_report(package.path / "report/check.json").cases[0].inputs["tokens"] == [1, 3]
    with pytest.raises(UserError, match="has no tokenizer, so it cannot take text"):
        run(package.path, "w0")
    with pytest.raises(UserError, match=r"check.prompts: the source has no tokenizer to read them with; give"):
        shop.build(shop.config("bare", "BertForMaskedLM", {"prompts": ["w0"]}, model=model))
