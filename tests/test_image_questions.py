"""A question about an image as token ids: the template's place for it becomes all that one image is in a prompt."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from runners.chat_encoding import encode_chat, encode_question
from runners.errors import UserError
from runners.manifest import ImagePrompt
from runners.manifest import Tokenizer as Entry
from runners.template import compile_template
from runners.tokenizer import TextCodec
from tests import tiny
from tests import tiny_vlm as vlm

ASKED = [{"role": "user", "content": "The fox"}]
PROMPT = ImagePrompt(token_id=vlm.IMAGE_ID, before=[301, 302], after=[301])
IMAGE = [301, 302, 300, 300, 300, 301]  # of three features
PARTS = compile_template(vlm.CHAT_TEMPLATE, {}, "parts.jinja")
TEXTS = compile_template(tiny.CHAT_TEMPLATE, {}, "texts.jinja")


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return codec_of(adds_bos=False)


def codec_of(*, adds_bos: bool) -> TextCodec:
    backend: Tokenizer = vlm.tokenizer().backend_tokenizer
    entry = Entry(file="", chat_template=None, bos_id=1, eos_ids=[2], adds_bos=adds_bos, special_tokens={})
    return TextCodec(backend, entry)


def test_a_template_that_loses_bare_texts_is_given_parts() -> None:
    assert PARTS.takes_parts and not TEXTS.takes_parts
    assert PARTS.render(ASKED) == TEXTS.render(ASKED)  # of a text the two write the same


def test_an_image_stands_where_the_template_has_it(codec: TextCodec) -> None:
    begin, end = "<|im_start|>user\n", "The fox<|im_end|>\n<|im_start|>assistant\n"
    ids = encode_question(codec, PARTS, ASKED, PROMPT, 3)
    assert ids == [*codec.encode_rendered(begin), *IMAGE, *codec.encode_rendered(end)]
    ids = encode_question(codec, TEXTS, ASKED, PROMPT, 3)
    assert ids == [*codec.encode_rendered(begin), *IMAGE, *codec.encode_rendered("\n" + end)]


def test_an_image_token_that_someone_typed_is_text(codec: TextCodec) -> None:
    asked = [{"role": "user", "content": "What is <image>?"}]
    assert vlm.IMAGE_ID not in encode_chat(codec, PARTS, asked)
    ids = encode_question(codec, PARTS, asked, PROMPT, 3)
    assert ids.count(vlm.IMAGE_ID) == 3 and codec.decode(ids).count("<image>") == 1


def test_without_a_template_the_image_comes_first_or_where_the_text_has_it() -> None:
    codec = codec_of(adds_bos=True)
    fox = codec.encode("The fox")[1:]
    assert encode_question(codec, None, ASKED, PROMPT, 3) == [1, *IMAGE, *fox]
    inside = [{"role": "user", "content": "The fox<image>"}]
    assert encode_question(codec, None, inside, PROMPT, 3) == [1, *fox, *IMAGE]


def test_a_template_without_a_place_for_an_image_is_an_error(codec: TextCodec) -> None:
    blind = compile_template("{% for m in messages %}{{ m['content'][-1]['text'] }}{% endfor %}", {}, "blind.jinja")
    with pytest.raises(UserError, match=r"blind\.jinja: has no place for an image, that is the token '<image>'"):
        encode_question(codec, blind, ASKED, PROMPT, 3)
