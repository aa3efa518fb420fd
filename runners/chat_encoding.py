"""A conversation as token ids: the template's markers are special tokens, what people and the model wrote is text."""

from __future__ import annotations

from collections.abc import Sequence

from runners.errors import UserError
from runners.manifest import ImagePrompt
from runners.template import ChatTemplate, Message
from runners.tokenizer import TextCodec


def encode_chat(
    codec: TextCodec, template: ChatTemplate, messages: Sequence[Message], image: str | None = None
) -> list[int]:
    """Ids of a conversation as ``template`` renders it, up to where the assistant's next answer begins.

    A special token in a message, as ``<|im_end|>``, is encoded as the characters that it is made of. Messages without
    one are encoded as the rendered text is.

    Args:
        codec: the tokenizer.
        template: the model's.
        messages: of the conversation.
        image: the token that stands for an image, which the last message then begins with; None: there is none.

    Raises:
        UserError: the template refuses the conversation, or a message is no valid text.
    """
    rendered = codec.encode_rendered(template.render(messages, image))
    special = codec.special
    if not any(special.are_in(text, codec.encode_rendered(text)) for text in (each["content"] for each in messages)):
        return rendered
    hidden = [{**message, "content": special.hide(message["content"])} for message in messages]
    return special.encode(template.render(hidden, image))


def encode_question(
    codec: TextCodec, template: ChatTemplate | None, messages: Sequence[Message], image: ImagePrompt, features: int
) -> list[int]:
    """Ids of a conversation whose last message is about an image.

    Args:
        codec: the tokenizer.
        template: the model's; None: the last message is the prompt as it is, and the image stands before it, or where
            the message has the token for it.
        messages: of the conversation.
        image: what an image becomes in a prompt.
        features: of one image.

    Raises:
        UserError: the template or the tokenizer has no place for an image, or the template refuses the conversation.
    """
    name = codec.tokenizer.id_to_token(image.token_id) or ""
    if template is not None:
        ids = encode_chat(codec, template, messages, name)
    else:
        text = messages[-1]["content"]
        ids = next((found for found in map(codec.encode, (text, name + text)) if image.token_id in found), [])
    if image.token_id not in ids:
        origin = template.origin if template is not None else "the tokenizer"
        raise UserError(f"{origin}: has no place for an image, that is the token {name!r} (id {image.token_id}).")
    whole = [*image.before, *[image.token_id] * features, *image.after]
    return [each for token in ids for each in (whole if token == image.token_id else [token])]
