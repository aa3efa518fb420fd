"""Caches through ``torch.onnx.export``: inputs and outputs of the graph, and ONNX Runtime decodes as eager does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers as tf
import yaml
from rich.console import Console
from torch.export import Dim, ExportedProgram
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, StaticCache

from pipeline.artifacts import Loaded, Package
from pipeline.build import BuildOptions, build
from pipeline.caches import empty_dynamic_cache, entry_of, registered, rewind
from pipeline.config import QuantizeSettings
from pipeline.config_reader import read
from pipeline.quantize import quantize
from pipeline.stage_cache import StageCache
from pipeline.stages import Stages
from runners.manifest import TensorSpec
from tests import tiny
from tests.test_caches_export import SIZES, WINDOW, cache_shapes, model_of
from tests.test_lift_cache import placed

pytestmark = [pytest.mark.export, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]

ROOT = Path(__file__).parents[1]
LENGTH, STEPS = 64, 24
PROMPTS = {tokens: torch.arange(7, 7 + 3 * tokens, 3)[None] % 60 + 3 for tokens in (1, 5, 17)}
Arrays = dict[str, np.ndarray]


def eager_tokens(model: PreTrainedModel, prompt: torch.Tensor) -> list[int]:
    """Greedy tokens without any cache."""
    ids = prompt
    for _ in range(STEPS):
        ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, prompt.shape[1] :].tolist()


def decoded(call: Callable[[np.ndarray, int], np.ndarray], prompt: torch.Tensor) -> list[int]:
    """Greedy tokens by calls ``(ids [1, S], tokens before them) -> logits``."""
    ids, at, tokens = prompt.numpy(), 0, []
    for _ in range(STEPS):
        logits, at = call(ids, at), at + ids.shape[1]
        ids = logits[:, -1:].argmax(-1)
        tokens.append(ids.item())
    return tokens


def stateful(
    session: onnxruntime.InferenceSession, cache: Mapping[str, np.ndarray], positions: bool
) -> Callable[[np.ndarray, int], np.ndarray]:
    """Calls of a graph that give it the cache of the call before, by name."""
    state = dict(cache)

    def call(ids: np.ndarray, at: int) -> np.ndarray:
        given = {"tokens": ids, "position": np.array([at])} if positions else {"input_ids": ids}
        found = dict(zip([x.name for x in session.get_outputs()], session.run(None, {**given, **state}), strict=True))
        for name in state:
            state[name] = found[f"new.{name}"]
        return found["logits"]

    return call


def new_names(cache: list[str]) -> list[str]:
    return [f"new.{name}" for name in cache]


def assert_cache_flows_through(path: Path, first: list[str], cache: Mapping[str, np.ndarray]) -> None:
    """The cache's tensors are inputs and outputs under their names, and none of them is an initialiser."""
    onnx.checker.check_model(path)
    graph = onnx.load(path).graph
    assert [x.name for x in graph.input] == [*first, *cache]
    assert [x.name for x in graph.output] == ["logits", *new_names(list(cache))]
    shapes = {tuple(x.shape) for x in cache.values() if x.ndim > 2}
    assert not [x.name for x in graph.initializer if tuple(x.dims) in shapes]
    assert {x for node in graph.node for x in node.input} >= {*first, *cache}


# A kept program


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a user stands: a model in ./my_model, and what its build has left in ./dist."""
    return tmp_path_factory.mktemp("onnx")


@pytest.fixture(scope="module")
def package(folder: Path) -> Package:
    tiny.save_llama(folder / "my_model")
    content = {
        "name": "my_model",
        "model": {"source": "./my_model"},
        "cache": {"max_length": LENGTH, "placement": "io"},
        "export": {"attention": "portable"},
        "package": {"directory": str(folder / "dist")},
    }
    (folder / "my_model.yaml").write_text(yaml.safe_dump(content))
    settings = read(folder / "my_model.yaml", ())
    options = BuildOptions(check=False, keep=("export",))
    return build(settings, options, Stages(Console(quiet=True)), StageCache(None))


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny.llama()


def cache_inputs(package: Package) -> list[TensorSpec]:
    return package.manifest.methods["forward"].inputs[2:]


@pytest.fixture(scope="module")
def kept(package: Package, folder: Path) -> tuple[Path, Arrays]:
    """The graph of the kept program with the manifest's names, and its empty cache."""
    forward = package.manifest.methods["forward"]
    inputs, cache = [x.name for x in forward.inputs], cache_inputs(package)
    program = torch.export.load(folder / "dist" / "my_model.export" / "forward.pt2")
    outputs = ["logits", *new_names([x.name for x in cache])]
    path = folder / "kept.onnx"
    torch.onnx.export(program, (), path, input_names=inputs, output_names=outputs, dynamo=True, verbose=False)
    return path, {x.name: np.zeros(x.shape, x.dtype) for x in cache}


def test_the_graph_has_the_cache_as_inputs_and_outputs_with_the_names_of_the_manifest(kept, package: Package) -> None:
    path, cache = kept
    assert list(cache) == [f"cache.layers.{i}.{what}" for i in range(2) for what in ("keys", "values")]
    assert list(cache) == [x.path for x in package.manifest.cache.tensors]
    assert_cache_flows_through(path, ["tokens", "position"], cache)


@pytest.mark.parametrize("tokens", PROMPTS)
def test_onnx_runtime_decodes_a_kept_program_as_eager_does(tokens: int, kept, llama: PreTrainedModel) -> None:
    path, cache = kept
    session = onnxruntime.InferenceSession(path)
    assert decoded(stateful(session, cache, positions=True), PROMPTS[tokens]) == eager_tokens(llama, PROMPTS[tokens])


WITH_TORCH_ALONE = """
import torch
import sys

module = torch.export.load("dist/my_model.export/forward.pt2").module()
for prompt in {prompts}:
    ids, position, tokens = torch.tensor([prompt]), 0, []
    cache = {{name: torch.zeros(shape) for name, shape in {shapes}.items()}}
    for _ in range({steps}):
        logits, *new = module(tokens=ids, position=torch.tensor([position]), **cache)
        cache, position, ids = dict(zip(cache, new)), position + ids.shape[1], logits[:, -1:].argmax(-1)
        tokens.append(int(ids))
    print(tokens)
assert not {{"pipeline", "runners", "transformers", "executorch"}} & set(sys.modules)
"""


def test_a_kept_program_runs_in_another_process_with_torch_alone(package, folder: Path, llama: PreTrainedModel) -> None:
    prompts = [prompt[0].tolist() for prompt in PROMPTS.values()]
    shapes = {x.name.replace(".", "_"): x.shape for x in cache_inputs(package)}
    script = WITH_TORCH_ALONE.format(prompts=prompts, shapes=shapes, steps=STEPS)
    assert output_of(script, folder).splitlines() == [str(eager_tokens(llama, x)) for x in PROMPTS.values()]


def output_of(script: str, folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


# Plain torch.onnx.export


def full() -> tf.PreTrainedConfig:
    return tf.LlamaConfig(**SIZES)


def sliding(window: int = WINDOW) -> tf.PreTrainedConfig:
    return tf.MistralConfig(**SIZES, sliding_window=window)


def mixed(window: int = WINDOW) -> tf.PreTrainedConfig:
    kinds = ["sliding_attention", "full_attention"]
    return tf.Gemma3TextConfig(**SIZES, sliding_window=window, layer_types=kinds, tie_word_embeddings=False)


PLAIN = {"full-static": (full, "static"), "sliding-static": (sliding, "static"), "mixed-dynamic": (mixed, "dynamic")}


def caches_of(kind: str, model: PreTrainedModel) -> tuple[Cache, Cache]:
    """One to trace with, and one to begin with."""
    if kind == "dynamic":
        filled, empty = tf.DynamicCache(config=model.config), empty_dynamic_cache(model.config)
        model(input_ids=PROMPTS[5][:, :3], cache=filled)
        return filled, empty
    caches = [StaticCache(model.config, max_cache_len=LENGTH) for _ in range(2)]
    for cache in caches:
        model(input_ids=PROMPTS[1], cache=cache)
        rewind(cache)
    return caches[0], caches[1]


@pytest.fixture(scope="module", params=PLAIN.values(), ids=PLAIN.keys())
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A random model, its graph with readable names, and the cache to begin with."""
    (config, kind), path = request.param, tmp_path_factory.mktemp("plain") / "plain.onnx"
    model = model_of(config())
    example, start = caches_of(kind, model)
    named = entry_of(type(start)).named_leaves(start)
    cache = {f"cache.{name}": leaf.numpy().copy() for name, leaf in named}
    with registered():
        torch.onnx.export(
            model,
            (),
            path,
            kwargs={"input_ids": PROMPTS[5], "cache": example},
            dynamic_shapes={"input_ids": {1: Dim.AUTO}, "cache": cache_shapes(example)},
            input_names=["input_ids", *cache],
            output_names=["logits", *new_names(list(cache))],
            dynamo=True,
            verbose=False,
        )
    return model, path, cache


def test_a_plain_export_has_the_cache_as_inputs_and_outputs(plain) -> None:
    _, path, cache = plain
    assert_cache_flows_through(path, ["input_ids"], cache)


@pytest.mark.parametrize("tokens", PROMPTS)
def test_onnx_runtime_decodes_a_plain_export_across_the_window_as_eager_does(tokens: int, plain) -> None:
    model, path, cache = plain
    assert tokens + STEPS > 2 * WINDOW
    session = onnxruntime.InferenceSession(path)
    assert decoded(stateful(session, cache, positions=False), PROMPTS[tokens]) == eager_tokens(model, PROMPTS[tokens])


@pytest.mark.parametrize("config", [sliding, mixed])
@pytest.mark.parametrize("tokens", PROMPTS)
def test_without_their_windows_these_models_would_choose_other_tokens(tokens: int, config) -> None:
    """Else the test above would not see a window that is lost."""
    with_window, without = (model_of(config(window)) for window in (WINDOW, LENGTH))
    assert eager_tokens(with_window, PROMPTS[tokens]) != eager_tokens(without, PROMPTS[tokens])


# What the documentation says


def documented_scripts() -> list[str]:
    section = (ROOT / "docs" / "caches.md").read_text().split("\n## ONNX\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)


@pytest.mark.parametrize("index", [0, 1], ids=["kept", "plain"])
def test_the_documented_scripts_print_eagers_tokens(index: int, package, folder: Path, llama: PreTrainedModel) -> None:
    scripts = documented_scripts()
    assert len(scripts) == 2
    printed = output_of(scripts[index], folder).splitlines()[-STEPS:]
    assert [int(line) for line in printed] == eager_tokens(llama, torch.tensor([[3, 1, 4, 1, 5]]))


def converted(program: ExportedProgram) -> onnx.GraphProto:
    return torch.onnx.export(program, (), dynamo=True, verbose=False).model_proto.graph


def test_custom_attention_is_refused_by_the_name_of_its_operator(llama: PreTrainedModel) -> None:
    with pytest.raises(torch.onnx.errors.OnnxExporterError, match=r"llama\.update_cache"):
        converted(placed(llama, "custom", "buffer").programs["forward"])


def test_a_cache_in_buffers_is_lost(llama: PreTrainedModel) -> None:
    """Should this fail, torch has learnt to export mutated buffers: then say so in the documentation."""
    graph = converted(placed(llama, "portable", "buffer").programs["forward"])
    assert [x.name for x in graph.input] == ["tokens", "position"]
    assert len(graph.output) == 1


def test_quantized_weights_become_a_graph_of_the_same_numbers(llama: PreTrainedModel, tmp_path: Path) -> None:
    quantized = quantize(Loaded(llama, identity=None, tokenizer=None), QuantizeSettings(linear="8da4w"))
    exported = placed(quantized.model, "portable", "io").programs["forward"]
    inputs = dict(zip(exported.example_inputs[1], [torch.tensor([[3, 1, 4]]), torch.tensor([0])], strict=False))
    inputs |= {name: x for name, x in exported.example_inputs[1].items() if name not in inputs}
    expected = exported.module()(**inputs)[0].numpy()
    torch.onnx.export(exported, (), tmp_path / "q.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "q.onnx")
    logits = session.run(None, {name: x.numpy() for name, x in inputs.items()})[0]
    unquantized = llama(input_ids=inputs["tokens"]).logits[:, -1:].numpy()
    assert np.abs(logits - expected).max() < 0.2 * np.abs(unquantized - expected).max()
