"""Stage ``load`` on tiny random models: from a folder and from a GGUF file."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, Gemma3TextConfig

from pipeline.config import ModelSettings
from pipeline.config_reader import read
from pipeline.load import infer_task, keep_layers, load
from runners.errors import UserError
from tests import tiny

CONFIGS = Path(__file__).parent.parent / "configs"


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Llama that a test may change."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "llama"))


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def settings(source: Path, **others: object) -> ModelSettings:
    return ModelSettings(source=str(source), **others)


def refused(source: Path, **others: object) -> str:
    with pytest.raises(UserError) as caught:
        load(settings(source, **others))
    return str(caught.value)


def change(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def assert_same_weights(model: torch.nn.Module, expected: torch.nn.Module) -> None:
    state = model.state_dict()
    assert state.keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert torch.equal(state[name], value), name


def test_folder(tiny_llama):
    loaded = load(settings(tiny_llama, licence="MIT"))
    assert_same_weights(loaded.model, tiny.llama())
    assert not loaded.model.training
    assert {weight.requires_grad for weight in loaded.model.parameters()} == {False}
    assert {weight.dtype for weight in loaded.model.parameters()} == {torch.float32}
    identity = loaded.identity
    assert (identity.architecture, identity.task, identity.licence) == ("LlamaForCausalLM", "text-generation", "MIT")
    assert (identity.vocabulary_size, identity.random_weights, len(identity.digest)) == (300, False, 64)
    assert identity.parameters == sum(weight.numel() for weight in tiny.llama().parameters())


def test_half_precision_checkpoints_become_float32(folder):
    halves = {name: value.half() for name, value in load_file(folder / "model.safetensors").items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    change(folder / "config.json", dtype="float16")
    weight = load(settings(folder)).model.model.embed_tokens.weight
    assert weight.dtype == torch.float32
    assert torch.equal(weight, tiny.llama().model.embed_tokens.weight.half().float())


def test_gguf_is_a_plain_model(gguf_file, tmp_path):
    loaded = load(settings(gguf_file))
    assert_same_weights(loaded.model, tiny.llama())
    assert not hasattr(loaded.model.config, "quantization_config")
    assert loaded.identity.licence == "MIT"
    loaded.model.save_pretrained(tmp_path / "again")  # refused for a model that counts as quantized
    assert_same_weights(load(settings(tmp_path / "again")).model, tiny.llama())


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_tokenizer(kind, tiny_llama, gguf_file):
    tokenizer = load(settings(tiny_llama if kind == "folder" else gguf_file)).tokenizer
    assert tokenizer is not None
    assert tokenizer.chat_template == tiny.CHAT_TEMPLATE
    info = tokenizer.info
    assert (info.bos_id, info.eos_ids, info.adds_bos) == (1, [2], False)
    assert info.special_tokens["eos_token"] == "<|im_end|>"
    text = "Héllo <|im_end|> the lazy dog\n"
    ids = Tokenizer.from_str(tokenizer.tokenizer_json).encode(text).ids
    assert ids == tiny.tokenizer()(text).input_ids


def test_end_tokens_are_combined_in_order(folder):
    change(folder / "generation_config.json", eos_token_id=[7, 2])
    change(folder / "config.json", eos_token_id=5)
    tokenizer = load(settings(folder)).tokenizer
    assert tokenizer is not None
    assert tokenizer.info.eos_ids == [7, 2, 5]


def test_saved_truncation_does_not_reach_the_package(folder):
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=3, pad_id=0, pad_token="<|endoftext|>")
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load(settings(folder)).tokenizer
    assert tokenizer is not None
    assert len(Tokenizer.from_str(tokenizer.tokenizer_json).encode("a long text of many tokens").ids) > 3


def test_no_tokenizer(tmp_path):
    assert load(settings(tiny.save_llama(tmp_path / "m", with_tokenizer=False))).tokenizer is None
    assert load(settings(tiny.save_gguf(tmp_path / "m.gguf", with_tokenizer=False))).tokenizer is None


def test_named_chat_templates_give_the_default(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = {"tool_use": "tools", "default": "plain"}
    tokenizer.save_pretrained(folder)
    loaded = load(settings(folder)).tokenizer
    assert loaded is not None
    assert loaded.chat_template == "plain"


def test_a_damaged_tokenizer_is_an_error(folder):
    (folder / "tokenizer.json").write_text("{}")
    assert "its tokenizer cannot be loaded" in refused(folder)


def test_a_tokenizer_of_another_model_warns(folder):
    tiny.tokenizer(310).save_pretrained(folder)
    with pytest.warns(UserWarning, match="ids up to 309, and the model's vocabulary 300"):
        load(settings(folder))


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_first_layers_without_warnings(kind, tiny_llama, gguf_file):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = load(settings(tiny_llama if kind == "folder" else gguf_file, num_layers=1)).model
    assert (len(model.model.layers), model.config.num_hidden_layers) == (1, 1)
    expected = tiny.llama()
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, expected.model.layers[0].mlp.up_proj.weight)
    assert torch.equal(model.model.norm.weight, expected.model.norm.weight)


def test_more_layers_than_there_are(tiny_llama):
    assert refused(tiny_llama, num_layers=3) == "model.num_layers: 3, but the model has 2 layers; give at most that"


def test_lists_a_layer_are_shortened():
    config = Gemma3TextConfig(num_hidden_layers=8)
    expected = config.layer_types[:3]
    keep_layers(config, 3)
    assert (config.num_hidden_layers, config.layer_types) == (3, expected)


def test_random_weights_need_a_config_alone(tiny_llama, tmp_path):
    shutil.copy(tiny_llama / "config.json", tmp_path)
    before = torch.random.get_rng_state()
    one, same, other = (load(settings(tmp_path, random_weights_seed=seed)) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert one.identity.random_weights
    assert one.tokenizer is None
    assert_same_weights(one.model, same.model)
    assert not torch.equal(one.model.model.embed_tokens.weight, other.model.model.embed_tokens.weight)


def test_no_weights(tiny_llama, tmp_path):
    shutil.copy(tiny_llama / "config.json", tmp_path)
    assert f"{tmp_path}: the weights cannot be loaded: " in refused(tmp_path)


def test_missing_weights_are_an_error(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    message = refused(folder)
    assert "lacks 1 weights of LlamaForCausalLM: model.layers.1.mlp.up_proj.weight" in message


def test_an_untied_model_needs_its_output_layer(folder):
    change(folder / "config.json", tie_word_embeddings=False)
    assert "lacks 1 weights of LlamaForCausalLM: lm_head.weight" in refused(folder)


def test_unexpected_weights_are_a_warning(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "extra.weight": torch.ones(1)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match=r"1 tensors are not used by LlamaForCausalLM: extra\.weight"):
        assert_same_weights(load(settings(folder)).model, tiny.llama())


def test_weights_of_another_shape(folder):
    change(folder / "config.json", intermediate_size=96)
    message = refused(folder)
    assert "6 weights do not have the shape that the config asks for" in message
    assert "model.layers.0.mlp.down_proj.weight (file [64, 128], model [64, 96])" in message


def test_pickled_weights_load_when_allowed(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert_same_weights(load(settings(folder, allow_pickle=True)).model, tiny.llama())


def test_unsupported_architectures(folder):
    change(folder / "config.json", architectures=["EsmForTokenClassification"], model_type="esm")
    message = refused(folder)
    assert "the architecture EsmForTokenClassification is not supported; supported are" in message
    change(folder / "config.json", model_type="none-such")
    assert "the model's config cannot be read" in refused(folder)


def test_the_task_can_be_inferred_without_a_named_architecture(tiny_llama):
    config = AutoConfig.from_pretrained(tiny_llama)
    config.architectures = None
    assert infer_task(config, None) == "text-generation"


def test_quantized_folders_are_refused(folder):
    change(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    assert "quantized already (quant_method gptq)" in refused(folder)


def test_loading_is_quiet(tiny_llama, gguf_file, capfd):
    load(settings(tiny_llama))
    load(settings(gguf_file))
    assert capfd.readouterr() == ("", "")


@pytest.mark.real
def test_smollm2():
    loaded = load(read(CONFIGS / "smollm2_135m_8da4w.yaml").model)
    assert (loaded.identity.parameters, loaded.identity.licence) == (134_515_008, "Apache-2.0")
    assert loaded.tokenizer is not None
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    backend = Tokenizer.from_str(loaded.tokenizer.tokenizer_json)
    ids = torch.tensor([backend.encode(prompt).ids])
    answer = loaded.model.generate(ids, max_new_tokens=10, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in backend.decode(answer.tolist())
