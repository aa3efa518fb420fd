"""Models that read images beside text, built whole from tiny random ones: the program says what eager PyTorch says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from rich.console import Console
from transformers import DynamicCache, PreTrainedModel
from typer.testing import CliRunner

from pipeline.build import BuildOptions, build
from pipeline.config_reader import read
from pipeline.load import load
from pipeline.stage_cache import StageCache
from pipeline.stages import Stages
from pipeline.vision import FEATURES, vision_of
from runners.check_command import command as check
from runners.cli import app
from runners.errors import UserError
from runners.image import preprocess, read_image
from runners.multimodal import METHODS, MultimodalSession
from runners.package import Package, open_package
from runners.tokenizer import open_tokenizer
from tests import tiny_vlm as tiny
from tests.stock import stock_answer_about

pytestmark = [pytest.mark.export, pytest.mark.filterwarnings("ignore")]

SMOLVLM, IDEFICS, LLAVA = tiny.MODELS
BUILT = (SMOLVLM, LLAVA)
STEPS, CLOSE = 24, 1e-3
QUANTIZED = {"quantize": {"linear": "8da4w", "lm_head": "8da8w", "embedding": "8w"}, "cache": {"max_length": 96}}


class Shop:
    """Builds a package of each model once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._built: dict[str, Package] = {}
        self.image = save_image(folder / "noise.png")

    def build(self, name: str, architecture: str, limits: dict[str, float], **sections: dict[str, object]) -> Package:
        if name in self._built:
            return self._built[name]
        source = self.folder / architecture
        if not source.exists():
            tiny.save(source, architecture)
        content = {
            "name": name,
            "model": {"source": str(source)},
            "cache": {"max_length": 128},
            "check": {"prompts": tiny.PROMPTS, "images": ["noise.png"], "steps": STEPS, "quantized": limits},
            "package": {"directory": str(self.folder / "dist")},
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**content, **sections}))
        cache = StageCache(self.folder / "cache")
        written = build(read(path), BuildOptions(), Stages(Console(quiet=True)), cache)
        self._built[name] = open_package(written.path)
        return self._built[name]

    def __getitem__(self, architecture: str) -> Package:
        limits = {"min_equal_prompts": 1.0, "max_logit_difference": CLOSE}
        return self.build(architecture.lower(), architecture, limits)


def save_image(path: Path, seed: int = 0) -> Path:
    noise = np.random.default_rng(seed).integers(0, 256, (24, 48, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    return path


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    return Shop(tmp_path_factory.mktemp("vlm"))


def pixels(seed: int) -> torch.Tensor:
    return torch.randn(1, 3, tiny.PIXELS, tiny.PIXELS, generator=torch.Generator().manual_seed(seed))


def features(package: Package) -> int:
    return package.manifest.methods["vision_encoder"].outputs[0].shape[1]


def asking(package: Package, before: list[int], after: list[int]) -> list[int]:
    prompt = package.manifest.image_prompt
    return [*before, *prompt.before, *[tiny.IMAGE_ID] * features(package), *prompt.after, *after]


def eager(model: PreTrainedModel, ids: list[int], image: torch.Tensor | None, steps: int = STEPS) -> torch.Tensor:
    """Logits [steps, V] of greedy steps, with transformers' own cache."""
    cache, fed, rows = DynamicCache(config=model.config), torch.tensor([ids]), []
    given = {} if image is None else {"pixel_values": vision_of(model.config).pixel_values(image)}
    with torch.inference_mode():
        for _ in range(steps):
            rows.append(model(input_ids=fed, cache=cache, use_cache=True, **given).logits[0, -1])
            fed, given = rows[-1].argmax(-1).reshape(1, 1), {}
    return torch.stack(rows)


def greedy(session: MultimodalSession, ids: list[int], image: torch.Tensor | None, steps: int = STEPS) -> torch.Tensor:
    """The same through the program."""
    session.reset()
    if image is not None:
        session.encode({"pixels": image})
    rows = [session.prefill(ids).clone()]
    for _ in range(steps - 1):
        rows.append(session.step(int(rows[-1].argmax())).clone())
    return torch.stack(rows)


def equal(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.equal(found.argmax(-1), wanted.argmax(-1)) and float((found - wanted).abs().max()) < CLOSE


@pytest.mark.parametrize("architecture", BUILT)
def test_an_answer_about_an_image_is_as_eager_says(shop: Shop, architecture: str) -> None:
    package, model = shop[architecture], tiny.model(architecture)
    session = MultimodalSession.open(package, threads=1)
    ids = asking(package, [1, 40, 50], [60, 70, 80, 90])
    assert equal(greedy(session, ids, pixels(0)), eager(model, ids, pixels(0)))


@pytest.mark.parametrize("architecture", BUILT)
def test_a_second_image_leaves_nothing_of_the_first(shop: Shop, architecture: str) -> None:
    package = shop[architecture]
    session = MultimodalSession.open(package, threads=1)
    ids = asking(package, [1], [60, 70])
    first, second = greedy(session, ids, pixels(0)), greedy(session, ids, pixels(1))
    fresh = greedy(MultimodalSession.open(package, threads=1), ids, pixels(1))
    assert torch.equal(second, fresh)
    assert float((first[0] - second[0]).abs().max()) > 0.1  # the image is looked at


@pytest.mark.parametrize("architecture", BUILT)
def test_a_text_without_an_image_is_as_eager_says_after_one_with(shop: Shop, architecture: str) -> None:
    package, model = shop[architecture], tiny.model(architecture)
    session = MultimodalSession.open(package, threads=1)
    greedy(session, asking(package, [1], [60]), pixels(0), steps=3)
    ids = [1, 40, tiny.IMAGE_ID, 50, 60]  # without an image its token is one as any other
    assert equal(greedy(session, ids, None), eager(model, ids, None))


def test_two_images_take_their_places_in_order(shop: Shop) -> None:
    package, model = shop[LLAVA], tiny.model(LLAVA)
    session = MultimodalSession.open(package, threads=1)
    ids = asking(package, asking(package, [1, 40], [50]), [60])
    both = torch.cat([pixels(0), pixels(1)])
    assert equal(greedy(session, ids, both, steps=4), eager(model, ids, both, steps=4))


def test_methods_have_the_names_and_the_shapes_of_the_stock_runner(shop: Shop) -> None:
    methods = shop[SMOLVLM].manifest.methods
    assert set(methods) == set(METHODS) == {"vision_encoder", "token_embedding", "text_decoder"}
    width, size = tiny.TEXT["hidden_size"], tiny.PIXELS
    found = {
        name: [(spec.dtype, spec.shape) for spec in (*method.inputs, *method.outputs)]
        for name, method in methods.items()
    }
    assert found["vision_encoder"] == [("float32", [1, 3, size, size]), ("float32", [1, 4, width])]
    assert found["token_embedding"] == [("int64", [1, 128]), ("float32", [1, 128, width])]
    assert found["text_decoder"] == [
        ("float32", [1, 128, width]),
        ("int64", [1]),
        ("float32", [1, 1, tiny.VOCABULARY]),
    ]


def test_the_stock_runner_writes_what_eager_does(shop: Shop, tmp_path: Path) -> None:
    package, model = shop[LLAVA], tiny.model(LLAVA)
    before, after, steps = [1, 64, 81], [72, 68, 90], 12
    found = stock_answer_about(package.program_path, package.tokenizer_path, before, pixels(0), after, steps, tmp_path)
    tokens = eager(model, asking(package, before, after), pixels(0), steps).argmax(-1).tolist()
    assert len(set(tokens)) > 6 and 2 not in tokens  # it is an answer, and not cut short
    assert found == open_tokenizer(package).decode(tokens)


def test_the_file_holds_each_weight_once(shop: Shop) -> None:
    package, model = shop[LLAVA], tiny.model(LLAVA)  # whose output layer is a tensor of its own
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    table = model.get_input_embeddings().weight.nbytes
    rest = package.program_path.stat().st_size - weights
    assert rest < table  # graphs and padding: no second copy of the embedding table


def test_no_operator_without_a_kernel_is_left(shop: Shop) -> None:
    operators = shop[SMOLVLM].manifest.methods["vision_encoder"].delegation.undelegated
    assert operators and not [each.name for each in operators if "bucketize" in each.name]


def test_weights_of_vision_and_text_are_quantized_and_the_cache_is_given(shop: Shop) -> None:
    sections = {**QUANTIZED, "cache": {"max_length": 96, "placement": "io"}}
    package = shop.build("quantized", SMOLVLM, {"min_equal_prompts": 0.6}, **sections)
    manifest = package.manifest
    linears = sum(isinstance(each, torch.nn.Linear) for each in tiny.model(SMOLVLM).modules())
    assert f"{linears - 1} weights" in manifest.quantization["quantize.linear"]
    undelegated = [each.name for each in manifest.methods["token_embedding"].delegation.undelegated]
    assert undelegated == ["quantized_decomposed::embedding_byte.out"]
    assert package.program_path.stat().st_size < shop[SMOLVLM].program_path.stat().st_size / 2
    assert len(manifest.methods["text_decoder"].inputs) == 2 + len(manifest.cache.tensors)
    assert len(manifest.methods["vision_encoder"].inputs) == 1
    check(package.path)  # what the build recorded is replayed


def test_a_question_about_an_image_file_is_answered(shop: Shop) -> None:
    package, model = shop[SMOLVLM], tiny.model(SMOLVLM)
    result = CliRunner().invoke(
        app, ["run", str(package.path), "The fox", "--image", str(shop.image), "--max-new-tokens", "6"]
    )
    codec = open_tokenizer(package)
    begin = codec.encode_rendered("<|im_start|>user\n")
    end = codec.encode_rendered("The fox<|im_end|>\n<|im_start|>assistant\n")
    seen = preprocess(read_image(shop.image), package.manifest.image)
    tokens = eager(model, asking(package, begin, end), seen, steps=6).argmax(-1).tolist()
    assert result.exit_code == 0, result.exception
    assert result.stdout == codec.decode(tokens[: tokens.index(2)] if 2 in tokens else tokens) + "\n"


def test_a_question_without_an_image_is_answered(shop: Shop) -> None:
    result = CliRunner().invoke(app, ["run", str(shop[SMOLVLM].path), "The fox", "--max-new-tokens", "4"])
    assert result.exit_code == 0 and result.stdout.strip()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--image", "missing.png"], "does not exist"),
        (["--image", "noise.png", "--interactive"], "--interactive"),
        (["--json"], "no effect"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    shop: Shop, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shop.folder)
    result = CliRunner().invoke(app, ["run", str(shop[SMOLVLM].path), "The fox", *arguments])
    assert isinstance(result.exception, UserError) and message in str(result.exception)


def test_images_without_a_place_and_of_another_size_are_refused(shop: Shop) -> None:
    session = MultimodalSession.open(shop[LLAVA], threads=1)
    session.encode({"pixels": pixels(0)})
    with pytest.raises(UserError, match="3 tokens that stand for images, and the images given take 16"):
        session.prefill([1, *[tiny.IMAGE_ID] * 3, 40])
    with pytest.raises(UserError, match="pixels is float32"):
        session.encode({"pixels": torch.zeros(1, 3, 16, 16)})


@pytest.mark.parametrize("architecture", [SMOLVLM, IDEFICS, LLAVA])
def test_features_are_those_of_the_model(architecture: str) -> None:
    model, image = tiny.model(architecture), pixels(0)
    row = vision_of(model.config)
    with torch.inference_mode():
        wanted = model.get_image_features(pixel_values=row.pixel_values(image)).pooler_output
        found = row.features(model, image)[FEATURES]
    assert torch.allclose(found[0], wanted[0], atol=1e-5)


def test_an_image_size_that_is_not_the_models_is_refused(shop: Shop, tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "other", LLAVA)
    steps = {**tiny.preprocessor("SiglipImageProcessor"), "size": {"height": 16, "width": 16}}
    (folder / "preprocessor_config.json").write_text(json.dumps(steps))
    path = tmp_path / "other.yaml"
    path.write_text(yaml.safe_dump({"name": "other", "model": {"source": str(folder)}}))
    with pytest.raises(UserError, match="16 x 16 pixels, its config says 32 x 32"):
        load(read(path).model)
