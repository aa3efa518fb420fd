"""Goldens: written and read back unchanged, damaged files refused; the eager side agrees with transformers."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipeline.goldens import (
    Prompt,
    assemble,
    forced_logits,
    full_logits,
    greedy_from_draft,
    greedy_logits,
    mean_nll,
    prompt_length_to_the_end,
    record,
    record_forced,
    rounding_of,
    tokens_of,
)
from runners.errors import UserError
from runners.goldens import (
    TOP,
    GoldenPrompt,
    Goldens,
    GoldenText,
    Rounding,
    RoundingFigures,
    load,
    save,
    summarise,
)
from tests import tiny

STEPS = 6


@pytest.fixture(scope="module")
def model():
    return tiny.llama(tiny.Shape(vocabulary=300))


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(1)
    return [
        Prompt("0", "one", torch.randint(3, 300, (7,), generator=generator)),
        Prompt("long", "two", torch.randint(3, 300, (40,), generator=generator)),
    ]


def figures(kl: float) -> RoundingFigures:
    return RoundingFigures(
        equal_steps=3, max_margin=0.1, max_logit_difference=2.5, mean_logit_difference=0.5, mean_kl=kl
    )


def some_goldens() -> Goldens:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 300, generator=generator)
    other = torch.randn(4, 300, generator=generator)
    prompt = GoldenPrompt(
        name="0",
        text="Was ist das? 漢字 'x'",
        prompt_ids=torch.tensor([5, 6, 7]),
        forced=logits.argmax(-1),
        quantized=summarise(logits),
        unquantized=summarise(other),
        rounding=Rounding(recorded=figures(0.125), whole=figures(0.25)),
    )
    return Goldens((prompt,), GoldenText(torch.arange(20), 8, 3.25, 3.0))


def flat(value) -> list:
    if isinstance(value, torch.Tensor):
        return [(value.dtype, value.tolist())]
    if isinstance(value, tuple):
        return [item for part in value for item in flat(part)]
    if dataclasses.is_dataclass(value):
        return [item for field in dataclasses.fields(value) for item in flat(getattr(value, field.name))]
    return [value]


def test_round_trip(tmp_path: Path) -> None:
    goldens = some_goldens()
    save(goldens, tmp_path / "g.safetensors")
    assert flat(load(tmp_path / "g.safetensors")) == flat(goldens)
    assert [file.name for file in tmp_path.iterdir()] == ["g.safetensors"]


def test_round_trip_without_text(tmp_path: Path) -> None:
    goldens = dataclasses.replace(some_goldens(), text=None)
    save(goldens, tmp_path / "g.safetensors")
    assert load(tmp_path / "g.safetensors").text is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_figures_that_are_not_finite_survive(tmp_path: Path, value: float) -> None:
    rounding = Rounding(recorded=figures(value), whole=figures(1.0))
    prompt = dataclasses.replace(some_goldens().prompts[0], rounding=rounding)
    save(Goldens((prompt,), None), tmp_path / "g.safetensors")
    found = load(tmp_path / "g.safetensors").prompts[0].rounding
    assert found.recorded.mean_kl == pytest.approx(value, nan_ok=True)
    assert found.whole == rounding.whole


def test_goldens_of_another_format_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runners.goldens.FORMAT", "pteline-goldens-1")
    save(some_goldens(), tmp_path / "g.safetensors")
    monkeypatch.undo()
    with pytest.raises(UserError, match="format 'pteline-goldens-1', expected 'pteline-goldens-2'"):
        load(tmp_path / "g.safetensors")


def test_equal_names_are_refused(tmp_path: Path) -> None:
    prompt = some_goldens().prompts[0]
    with pytest.raises(ValueError, match="distinct"):
        save(Goldens((prompt, prompt), None), tmp_path / "g.safetensors")
    assert not list(tmp_path.iterdir())


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.safetensors"):
        load(tmp_path / "none.safetensors")


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, 0.999])
def test_truncated_file(tmp_path: Path, kept: float) -> None:
    path = tmp_path / "g.safetensors"
    save(some_goldens(), path)
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    with pytest.raises(UserError, match=r"g\.safetensors"):
        load(path)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    path = tmp_path / "g.safetensors"
    save(some_goldens(), path)
    rewrite(path, lambda tensors: tensors.pop("0/quantized/top_ids"))
    with pytest.raises(UserError, match="lack the tensor '0/quantized/top_ids'"):
        load(path)


def test_tensor_of_wrong_shape_is_named(tmp_path: Path) -> None:
    path = tmp_path / "g.safetensors"
    save(some_goldens(), path)
    rewrite(path, lambda tensors: tensors.update({"0/quantized/tokens": torch.tensor([1])}))
    with pytest.raises(UserError, match=r"'0/quantized/tokens' is torch.int64 \[1\], expected torch.int64 \[4\]"):
        load(path)


def test_other_safetensors_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"w": torch.ones(2)}, path)
    with pytest.raises(UserError, match="not a file of goldens"):
        load(path)


def rewrite(path: Path, edit) -> None:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    edit(tensors)
    save_file(tensors, path, metadata=metadata)


def test_summarise_keeps_the_largest() -> None:
    logits = torch.randn(3, 500)
    reference = summarise(logits)
    assert reference.top_ids.shape == (3, TOP)
    assert torch.equal(reference.top_logits, logits.sort(-1, descending=True).values[:, :TOP])
    assert torch.equal(reference.tokens, logits.argmax(-1))
    torch.testing.assert_close(reference.log_sum_exp, logits.exp().sum(-1).log())


def test_summarise_of_a_small_vocabulary() -> None:
    assert summarise(torch.randn(3, 10)).top_ids.shape == (3, 10)


def test_greedy_tokens_are_those_of_generate(model, prompts) -> None:
    for prompt, tokens in zip(prompts, tokens_of(record(model, prompts, STEPS, ())), strict=True):
        generated = model.generate(
            prompt.ids.unsqueeze(0), do_sample=False, max_new_tokens=STEPS, eos_token_id=None, pad_token_id=0
        )
        assert tokens.tolist() == generated[0, prompt.ids.shape[0] :].tolist()


@pytest.mark.parametrize("ends", range(STEPS))
def test_greedy_tokens_end_where_generate_ends(model, prompts, ends: int) -> None:
    """Each of the tokens is declared an end in turn, beside one that never comes."""
    prompt = prompts[0]
    tokens = greedy_logits(model, prompt.ids, STEPS).argmax(-1).tolist()
    eos_ids = [tokens[ends], next(token for token in range(300) if token not in tokens)]
    generated = model.generate(
        prompt.ids.unsqueeze(0), do_sample=False, max_new_tokens=STEPS, eos_token_id=eos_ids, pad_token_id=0
    )
    expected = generated[0, prompt.ids.shape[0] :].tolist()
    assert len(expected) == tokens.index(tokens[ends]) + 1
    drafts = [None, [torch.tensor(tokens)], [torch.tensor(tokens[:1])], [torch.tensor([7] * STEPS)]]
    for draft in drafts:
        assert tokens_of(record(model, [prompt], STEPS, eos_ids, draft))[0].tolist() == expected


def test_a_prompt_that_does_not_end_runs_all_steps(model, prompts) -> None:
    tokens = greedy_logits(model, prompts[0].ids, STEPS).argmax(-1)
    both = [prompts[0], dataclasses.replace(prompts[0], name="long", to_eos=False)]
    eos_ids = [int(tokens[1])]
    for drafts in (None, [tokens[:2], tokens[:2]]):
        ended, whole = record(model, both, STEPS, eos_ids, drafts, keep_logits=True)
        assert ended.logits.shape[0] == ended.reference.top_ids.shape[0] <= 2
        assert whole.reference.tokens.tolist() == tokens.tolist()


def test_a_prompt_whose_first_token_ends_it_has_one_step(model, prompts, tmp_path: Path) -> None:
    eos_ids = [int(greedy_logits(model, prompts[0].ids, 1).argmax())]
    recordings = record(model, prompts, STEPS, eos_ids)
    assert recordings[0].reference.tokens.tolist() == eos_ids
    save(assemble(prompts, recordings, recordings), tmp_path / "g.safetensors")
    assert load(tmp_path / "g.safetensors").prompts[0].forced.tolist() == eos_ids


def test_forced_logits_are_those_of_a_decode(model, prompts) -> None:
    """One forward over prompt and tokens against a cache that is fed token by token."""
    stepwise = greedy_logits(model, prompts[1].ids, STEPS)
    forced = forced_logits(model, prompts[1].ids, stepwise.argmax(-1))
    # Other matrix shapes round otherwise; a token out of place moves these logits by whole units.
    torch.testing.assert_close(forced, stepwise, atol=1e-3, rtol=0)


def test_forced_tokens_are_fed_as_given(model, prompts) -> None:
    forced = torch.tensor([9, 8, 7, 6, 5, 4])
    found = forced_logits(model, prompts[0].ids, forced)
    for step in range(STEPS):
        ids = torch.cat([prompts[0].ids, forced[:step]])
        torch.testing.assert_close(found[step], model(ids[None], use_cache=False).logits[0, -1], atol=1e-3, rtol=0)


@pytest.mark.parametrize("right", range(STEPS + 1))
def test_any_draft_ends_in_the_greedy_tokens(model, prompts, right: int) -> None:
    """Drafts whose first tokens are right, whose others are not."""
    logits = greedy_logits(model, prompts[0].ids, STEPS)
    tokens = logits.argmax(-1)
    draft = torch.cat([tokens[:right], (tokens[right:] + 1) % 300])
    found = greedy_from_draft(model, prompts[0].ids, draft)
    assert found.argmax(-1).tolist() == tokens.tolist()
    torch.testing.assert_close(found, logits, atol=1e-3, rtol=0)
    # To the last bit the same as with any other draft.
    assert torch.equal(found, greedy_from_draft(model, prompts[0].ids, torch.full((STEPS,), 7)))


def test_a_right_draft_takes_one_forward(model, prompts) -> None:
    tokens = tokens_of(record(model, prompts[:1], STEPS, ()))
    calls = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    recordings = record(model, prompts[:1], STEPS, (), tokens)
    handle.remove()
    assert len(calls) == 1
    assert recordings[0].reference.tokens.tolist() == tokens[0].tolist()


def test_assembled_goldens_are_saved(model, prompts, tmp_path: Path) -> None:
    """An unquantized package: both references are one, and share their tensors."""
    recordings = record(model, prompts, STEPS, ())
    goldens = assemble(prompts, recordings, recordings)
    save(goldens, tmp_path / "g.safetensors")
    assert flat(load(tmp_path / "g.safetensors")) == flat(goldens)


def test_assembled_goldens_force_the_quantized_model_s_tokens(model, prompts) -> None:
    source = tiny.llama(tiny.Shape(vocabulary=300), seed=1)
    quantized = record(model, prompts, STEPS, (), keep_logits=True)
    unquantized = record_forced(source, prompts, tokens_of(quantized), keep_logits=True)
    goldens = assemble(prompts, quantized, unquantized)
    first = goldens.prompts[0]
    assert first.forced.tolist() == first.quantized.tokens.tolist()
    expected = forced_logits(source, prompts[0].ids, first.forced)
    assert first.unquantized.tokens.tolist() == expected.argmax(-1).tolist()
    assert torch.equal(full_logits(prompts, quantized, unquantized).unquantized["0"], expected)


def test_logits_are_dropped_unless_asked_for(model, prompts) -> None:
    recordings = record(model, prompts[:1], 2, ())
    assert recordings[0].logits is None
    assert full_logits(prompts[:1], recordings, recordings).quantized == {}


def test_rounding_compares_two_runs_along_the_same_tokens(model, prompts) -> None:
    """A model of other weights takes the place of the float64 one, so that the figures are not small."""
    other = tiny.llama(tiny.Shape(vocabulary=300), seed=1)
    recordings = record(model, prompts, STEPS, (), keep_logits=True)
    found = rounding_of(other, prompts, recordings)[1]
    theirs = forced_logits(other, prompts[1].ids, recordings[1].reference.tokens).double()
    ours = recordings[1].logits.double()
    difference = (theirs - ours).abs()
    assert found.whole.equal_steps == int((theirs.argmax(-1) == ours.argmax(-1)).sum()) < STEPS
    assert found.whole.max_logit_difference == pytest.approx(float(difference.max()))
    assert found.whole.mean_logit_difference == pytest.approx(float(difference.mean()))
    kl = torch.nn.functional.kl_div(theirs.log_softmax(-1), ours.log_softmax(-1), reduction="none", log_target=True)
    assert found.whole.mean_kl == pytest.approx(float(kl.sum(-1).mean()))
    assert 0 < found.recorded.mean_kl < found.whole.mean_kl
    margins = ours.amax(-1) - ours.gather(-1, theirs.argmax(-1, keepdim=True))[:, 0]
    assert 0 < found.recorded.max_margin <= float(margins.max()) + 1e-9


def test_mean_nll_is_the_model_s_own_loss(model) -> None:
    ids = torch.randint(3, 300, (25,), generator=torch.Generator().manual_seed(3))
    losses = [float(model(part[None], labels=part[None]).loss) for part in ids.split(10)]
    expected = (9 * losses[0] + 9 * losses[1] + 4 * losses[2]) / 22
    assert mean_nll(model, ids, 10) == pytest.approx(expected, rel=1e-5)


def test_text_without_a_scored_token(model) -> None:
    with pytest.raises(ValueError, match="no token to score"):
        mean_nll(model, torch.tensor([5]), 10)


def test_prompt_to_the_end_fills_the_last_position() -> None:
    length = prompt_length_to_the_end(max_length=100, steps=8)
    fed = 8 - 1  # the last of eight greedy tokens is never fed
    assert length + fed == 100
    with pytest.raises(ValueError, match="do not fit"):
        prompt_length_to_the_end(max_length=4, steps=8)
