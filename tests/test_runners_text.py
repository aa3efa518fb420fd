"""Text in and out: streaming detokenisation, chat templates, encoding."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers.utils.chat_template_utils import render_jinja_template

from runners.errors import UserError
from runners.manifest import Tokenizer as TokenizerEntry
from runners.package import open_package
from runners.template import compile_template, open_template
from runners.tokenizer import TextCodec, TextStream, open_tokenizer
from tests import tiny
from tests.packages import Program, write_package


def entry(**values) -> TokenizerEntry:
    fields = {"file": "tokenizer.json", "chat_template": None, "bos_id": 1, "eos_ids": [2, 0], "adds_bos": False}
    return TokenizerEntry(**{**fields, "special_tokens": {}, **values})


def byte_fallback() -> Tokenizer:
    """A tokenizer of SentencePiece's kind: a few letters, and a token for each byte."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for piece in [f"<0x{byte:02X}>" for byte in range(256)] + list("▁abcdefgh"):
        vocabulary[piece] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


CODECS = {
    "byte-level": TextCodec(tiny.tokenizer().backend_tokenizer, entry()),
    "byte-fallback": TextCodec(byte_fallback(), entry()),
}


def streamed(codec: TextCodec, ids: list[int]) -> list[str]:
    stream = TextStream(codec)
    return [*(stream.push(token) for token in ids), stream.finish()]


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@given(st.text(max_size=30))
def test_streamed_text_equals_the_text_decoded_whole(codec, text):
    ids = codec.encode(text)
    assert "".join(streamed(codec, ids)) == codec.decode(ids)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@given(st.data())
def test_any_ids_stream_without_an_error(codec, data):
    """A model may write bytes that are no UTF-8: they show as replacement characters, and later text is whole."""
    ids = data.draw(st.lists(st.integers(3, codec.tokenizer.get_vocab_size() - 1), max_size=20))
    assert "".join(streamed(codec, [*ids, *codec.encode("\nbed")])).endswith("bed")


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_a_character_of_several_tokens_appears_whole(codec):
    ids = codec.encode("é😀")
    pieces = streamed(codec, ids)
    assert len(ids) > 2
    assert [piece for piece in pieces if piece] == ["é", "😀"]


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_an_incomplete_end_is_shown_as_such(codec):
    pieces = streamed(codec, codec.encode("a😀")[:-1])
    assert pieces[0] == "a"
    assert set(pieces[-1]) == {"\ufffd"}


def test_special_tokens_are_not_shown():
    codec = CODECS["byte-level"]
    assert "".join(streamed(codec, [1, *codec.encode("day"), 2])) == "day"


def test_bos_is_added_once_where_the_model_expects_it():
    tokenizer = tiny.tokenizer().backend_tokenizer
    plain, adding = TextCodec(tokenizer, entry()), TextCodec(tokenizer, entry(adds_bos=True))
    ids = plain.encode("day")
    assert adding.encode("day") == [1, *ids]
    assert adding.encode("<|im_start|>day") == [1, *ids]
    assert adding.encode_rendered("day") == ids


def test_text_that_is_no_unicode_is_refused():
    with pytest.raises(UserError, match="not valid UTF-8"):
        CODECS["byte-level"].encode("caf\udce9")


def test_a_package_without_tokenizer_says_so(tmp_path):
    package = open_package(write_package(tmp_path / "toy", Program(b"x"), with_tokenizer=False))
    with pytest.raises(UserError, match="'toy' has no tokenizer"):
        open_tokenizer(package)
    assert open_template(package) is None


def test_a_file_that_is_no_tokenizer_is_named(tmp_path):
    package = open_package(write_package(tmp_path / "toy", Program(b"x")))
    package.tokenizer_path.write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json: not a readable tokenizer"):
        open_tokenizer(package)


MESSAGES = [{"role": "system", "content": "Be <brief> & kind."}, {"role": "user", "content": "Wie geht's, Zoë?"}]
TEMPLATES = {
    "chatml": tiny.CHAT_TEMPLATE,
    "trimmed blocks, loop controls, generation": """
    {%- for message in messages %}
        {% if loop.index > 5 %}{% break %}{% endif %}
        {%- generation %}
{{ bos_token }}{{ message['content'] | trim }}
        {% endgeneration %}
    {%- endfor %}
    {%- if add_generation_prompt %}A:{% endif %}""",
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2, sort_keys=True) }}",
    "namespace and tools": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
        "{% if tools %}tools{% endif %}{{ strftime_now('%Y') | length }}"
    ),
}


@pytest.mark.parametrize("text", TEMPLATES.values(), ids=TEMPLATES)
def test_templates_render_as_transformers_renders_them(text):
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    expected, _ = render_jinja_template([MESSAGES], chat_template=text, add_generation_prompt=True, **special)
    assert compile_template(text, special, "test").render(MESSAGES) == expected[0]


def test_a_template_that_refuses_says_why():
    template = compile_template("{{ raise_exception('system role not supported') }}", {}, "chat.jinja")
    with pytest.raises(UserError, match=r"chat\.jinja: .*system role not supported.*--raw"):
        template.render(MESSAGES)


@pytest.mark.parametrize(
    "text", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages[9]['x'] }}"]
)
def test_a_template_that_fails_or_leaves_the_sandbox_is_an_error(text):
    with pytest.raises(UserError, match="refuses this conversation"):
        compile_template(text, {}, "chat.jinja").render(MESSAGES)


def test_an_invalid_template_is_an_error():
    with pytest.raises(UserError, match=r"chat\.jinja: not a valid chat template"):
        compile_template("{% if %}", {}, "chat.jinja")


def test_the_package_template_is_opened(tmp_path: Path):
    template = open_template(open_package(write_package(tmp_path / "toy", Program(b"x"))))
    assert template.render([{"role": "user", "content": "Hi"}]).endswith("<|im_start|>assistant\n")
