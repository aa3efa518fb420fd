"""A conversation as token ids: the template's markers are special tokens, what people and the model wrote is text."""

from __future__ import annotations

from collections.abc import Sequence

from runners.template import ChatTemplate, Message
from runners.tokenizer import TextCodec


def encode_chat(codec: TextCodec, template: ChatTemplate, messages: Sequence[Message]) -> list[int]:
    """Ids of a conversation as ``template`` renders it, up to where the assistant's next answer begins.

    A special token in a message, as ``<|im_end|>``, is encoded as the characters that it is made of. Messages without
    one are encoded as the rendered text is.

    Raises:
        UserError: the template refuses the conversation, or a message is no valid text.
    """
    rendered = codec.encode_rendered(template.render(messages))
    special = codec.special
    if not any(special.are_in(text, codec.encode_rendered(text)) for text in (each["content"] for each in messages)):
        return rendered
    hidden = [{**message, "content": special.hide(message["content"])} for message in messages]
    return special.encode(template.render(hidden))
