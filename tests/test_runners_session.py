"""Sessions over real programs: the logits equal eager PyTorch's, whatever was in the cache before."""

from __future__ import annotations

from threading import Thread

import pytest
import torch

from runners.errors import UserError
from runners.generate import Finish, generate
from runners.manifest import Manifest
from runners.package import Package, open_package
from runners.program import Program as LoadedProgram
from runners.runtime import portable_lib, require_runtime
from runners.sampling import greedy
from runners.session import ContextEndError, Session
from runners.threads import torch_cpu_libraries
from tests.packages import CHUNK, L, Program, V, eager_logits, program_bytes, write_package

pytestmark = pytest.mark.export

VARIANTS = {"forward": ("buffer", False), "forward+decode": ("buffer", True), "io": ("io", False)}


@pytest.fixture(scope="module", params=VARIANTS)
def package(request, tmp_path_factory) -> Package:
    """The toy model, with its cache in buffers (with and without a decode method) and as inputs and outputs."""
    placement, decode = VARIANTS[request.param]
    methods = ("forward", "decode") if decode else ("forward",)
    program = Program(program_bytes(placement, decode=decode), placement, methods)
    return open_package(write_package(tmp_path_factory.mktemp("package") / "toy", program))


@pytest.fixture
def session(package) -> Session:
    return Session.open(package)


def ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(V, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def follow(session: Session, prompt: list[int], forced: list[int]) -> torch.Tensor:
    """Logits [1 + len(forced), V] after the prompt and after each forced token."""
    rows = [session.prefill(prompt).clone()]
    rows += [session.step(token).clone() for token in forced]
    return torch.stack(rows)


def test_logits_equal_eager_to_the_last_cache_position(session):
    """A prompt of several chunks (the last one shorter), then one by one until the cache is exactly full."""
    tokens = ids(L)
    n = 2 * CHUNK + 3
    found = follow(session, tokens[:n], tokens[n:])
    torch.testing.assert_close(found, eager_logits(tokens)[n - 1 :], rtol=1e-5, atol=1e-5)
    assert session.position == L
    with pytest.raises(ContextEndError):
        session.step(0)
    assert session.position == L


def test_second_prompt_equals_a_fresh_load(package, session):
    first, second = ids(L, seed=1), ids(CHUNK + 5, seed=2)
    follow(session, first[:20], first[20:])
    session.reset()
    again = follow(session, second[:CHUNK], second[CHUNK:])
    fresh = follow(Session.open(package), second[:CHUNK], second[CHUNK:])
    assert torch.equal(again, fresh)


def test_rewind_forgets_what_lay_beyond(session):
    common, old, new = ids(6, 3), ids(9, 4), ids(9, 5)
    follow(session, common + old, [])
    assert session.rewind(len(common)) == len(common)
    assert session.tokens == tuple(common)
    found = follow(session, new[:4], new[4:])
    torch.testing.assert_close(found, eager_logits(common + new)[len(common) + 3 :], rtol=1e-5, atol=1e-5)


def test_forward_and_decode_see_one_cache_in_any_order(session):
    """Prefill, step, prefill, step: a decode with a cache of its own would differ at once."""
    tokens = ids(12, 6)
    rows = [session.prefill(tokens[:5])[None].clone(), session.step(tokens[5])[None].clone()]
    rows += [session.prefill(tokens[6:11])[None].clone(), session.step(tokens[11])[None].clone()]
    expected = eager_logits(tokens)[[4, 5, 10, 11]]
    torch.testing.assert_close(torch.cat(rows), expected, rtol=1e-5, atol=1e-5)


def test_feed_gives_every_row_the_program_computes(session):
    tokens = ids(CHUNK, 7)
    rows = session.feed(tokens)
    assert rows.shape[0] in (1, CHUNK)
    torch.testing.assert_close(rows, eager_logits(tokens)[-rows.shape[0] :], rtol=1e-5, atol=1e-5)


def test_two_sessions_do_not_share_a_cache(package, session):
    other, tokens = Session.open(package), ids(10, 8)
    session.prefill(tokens[:5])
    other.prefill(ids(5, 9))
    torch.testing.assert_close(session.step(tokens[5]), eager_logits(tokens[:6])[-1], rtol=1e-5, atol=1e-5)


def test_a_prompt_that_does_not_fit_is_refused_and_nothing_is_written(session):
    session.prefill(ids(10))
    with pytest.raises(UserError, match=f"prompt has {L} tokens.*holds {L}, 10 of them used"):
        session.prefill(ids(L))
    assert session.position == 10
    with pytest.raises(UserError, match="no tokens"):
        session.prefill([])


def test_an_id_outside_the_vocabulary_is_refused(session):
    with pytest.raises(UserError, match=f"token id {V} .* vocabulary of {V}"):
        session.prefill([1, V])
    assert session.position == 0


def test_generate_stops_at_the_context_end(session):
    """L - n tokens are fed back, and the last logits give one more."""
    prompt, shown = ids(L - 4), []
    answer = generate(session, prompt, greedy, eos_ids=frozenset(), max_new_tokens=100, emit=shown.append)
    assert answer.finish is Finish.CONTEXT
    assert (len(answer.tokens), answer.steps, session.position) == (5, 4, L)
    assert shown == list(answer.tokens)
    whole = eager_logits(prompt + shown[:-1])[L - 5 :].argmax(-1)
    assert whole.tolist() == shown


def test_generate_stops_at_eos_and_at_the_limit(session):
    prompt = ids(5)
    free = generate(session, prompt, greedy, eos_ids=frozenset(), max_new_tokens=6, emit=lambda _: None)
    assert (free.finish, len(free.tokens), free.steps) == (Finish.LENGTH, 6, 5)
    end = next(token for token in free.tokens if token != free.tokens[0])
    session.reset()
    stopped = generate(session, prompt, greedy, eos_ids=frozenset([end]), max_new_tokens=6, emit=lambda _: None)
    assert stopped.finish is Finish.EOS
    assert stopped.tokens == free.tokens[: free.tokens.index(end)]


def test_generate_stops_when_asked(session):
    answer = generate(
        session, ids(5), greedy, eos_ids=frozenset(), max_new_tokens=6, emit=lambda _: None, stopped=lambda: True
    )
    assert (answer.finish, len(answer.tokens)) == (Finish.STOPPED, 1)


def test_missing_backend_and_operator_are_named(package):
    manifest = package.manifest.model_copy(update={"backends": ["NoBackend"], "operators": ["llama::no_such.out"]})
    with pytest.raises(UserError, match=r"lacks backend NoBackend, operator llama::no_such\.out"):
        LoadedProgram(Package(package.path, manifest))


def test_kernel_libraries_are_imported_for_the_operators_a_package_names(package):
    operators = ["llama::custom_sdpa.out", "llama::update_cache.out", "quantized_decomposed::embedding_4bit.out"]
    require_runtime(package.manifest.model_copy(update={"operators": operators}))
    assert set(operators) <= set(portable_lib._get_operator_names())


def test_a_program_that_the_runtime_refuses_is_one_error_with_its_reason(package, tmp_path):
    program = Program(package.program_path.read_bytes()[:-2000])
    cut = open_package(write_package(tmp_path / "cut", program))
    with pytest.raises(UserError, match=r"model\.pte: the runtime cannot load it: .*File size is too small"):
        LoadedProgram(cut)


def test_a_long_prompt_is_fed_in_calls_of_a_size_of_its_own(package, monkeypatch):
    monkeypatch.setattr("runners.session._PROMPT_CHUNK", 3)
    session, tokens = Session.open(package), ids(14)
    assert session.max_chunk == 3
    torch.testing.assert_close(
        follow(session, tokens[:11], tokens[11:]), eager_logits(tokens)[10:], rtol=1e-5, atol=1e-5
    )
    session.feed_prompts_whole()
    assert session.max_chunk == CHUNK
    monkeypatch.setattr("runners.session._PROMPT_CHUNK", L)
    assert Session.open(package).max_chunk == CHUNK


def test_blas_stays_on_the_thread_that_calls_it(package):
    """In a thread of which PyTorch knows nothing, as are those of the runtime's pool."""
    with_mkl = [library for library in torch_cpu_libraries() if hasattr(library, "mkl_serv_set_num_threads")]
    if not with_mkl:
        pytest.skip("PyTorch has no MKL here")
    with_mkl[0].mkl_serv_set_num_threads(2)
    Session.open(package)
    found: list[int] = []
    thread = Thread(target=lambda: found.append(with_mkl[0].mkl_serv_get_max_threads()))
    thread.start()
    thread.join()
    assert found == [1]


def test_only_a_library_that_can_be_loaded_is_looked_into(tmp_path, monkeypatch):
    """On Windows an import library lies beside it."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "torch_cpu.lib").write_bytes(b"!<arch>")
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    assert torch_cpu_libraries() == []


def test_threads_cannot_change_under_a_loaded_program(package, session):
    current = Session.open(package)
    with pytest.raises(UserError, match="a loaded program uses"):
        Session.open(package, threads=63)
    assert current.position == 0


def with_kind(kind: str):
    """A change of the manifest: the cache's tensor is of another kind."""

    def change(manifest: Manifest) -> Manifest:
        assert manifest.cache is not None
        tensor = manifest.cache.tensors[0].model_copy(update={"kind": kind, "shape": [1, 8, 8, 16]})
        return manifest.model_copy(update={"cache": manifest.cache.model_copy(update={"tensors": [tensor]})})

    return change


@pytest.mark.parametrize("kind", ["sliding", "recurrent"])
def test_a_cache_that_cannot_go_back_starts_anew(package, kind):
    changed = Package(package.path, with_kind(kind)(package.manifest))
    session, tokens = Session.open(changed), ids(12, 10)
    session.prefill(tokens)
    assert session.rewind(6) == 0
    assert session.tokens == ()
    torch.testing.assert_close(session.prefill(tokens[:9]), eager_logits(tokens[:9])[-1], rtol=1e-5, atol=1e-5)


def test_a_window_that_still_holds_everything_goes_back(package):
    session = Session.open(Package(package.path, with_kind("sliding")(package.manifest)))
    session.prefill(ids(8))
    assert session.rewind(3) == 3


@pytest.mark.parametrize(("attention", "shape"), [("custom", [1, 8, 2, 16]), ("portable", [1, 2, 8, 16])])
def test_the_length_of_a_window_is_where_its_attention_has_it(package, attention, shape):
    cache = package.manifest.cache
    tensor = cache.tensors[0].model_copy(update={"kind": "sliding", "shape": shape})
    cache = cache.model_copy(update={"tensors": [tensor], "attention": attention})
    session = Session.open(Package(package.path, package.manifest.model_copy(update={"cache": cache})))
    session.prefill(ids(8))
    assert session.rewind(3) == 3
    session.prefill(ids(6, 3))
    assert session.rewind(3) == 0
