"""Chat templates: jinja2 in a sandbox, with the names and settings that transformers gives its templates.

The contract is ``transformers.utils.chat_template_utils``: trimmed blocks, loop controls, ``raise_exception``,
``strftime_now``, a ``tojson`` that does not escape HTML, and the ``generation`` block, which renders its body.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runners.errors import UserError
from runners.package import Package

Message = Mapping[str, str]  # {"role": "user", "content": "…"}
_PROBE = "probe"


class GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's text for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The statements between the two tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled chat template and the special tokens it may write."""

    template: jinja2.Template
    special_tokens: Mapping[str, str]
    origin: str  # for messages
    takes_parts: bool = False  # a message's content is a list of texts and images, as of vision models

    def render(self, messages: Sequence[Message], image: str | None = None) -> str:
        """The conversation as the model's prompt, up to where the assistant's next answer begins.

        Args:
            messages: of the conversation.
            image: the token that stands for an image, which the last message then begins with; None: there is none.

        Raises:
            UserError: the template refuses the conversation, or fails.
        """
        given: list[Mapping[str, object]] = list(messages)
        if self.takes_parts:
            given = [*map(_in_parts, messages[:-1]), _in_parts(messages[-1], image is not None)]
        elif image is not None:
            given[-1] = {**messages[-1], "content": f"{image}\n{messages[-1]['content']}"}
        try:
            return _rendered(self.template, given, self.special_tokens)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise UserError(
                f"{self.origin}: the chat template refuses this conversation ({error}). "
                "Leave --system out if the model takes no system message, or use --raw."
            ) from error


def _rendered(template: jinja2.Template, messages: Sequence[object], special_tokens: Mapping[str, str]) -> str:
    return template.render(
        messages=list(messages), tools=None, documents=None, add_generation_prompt=True, **special_tokens
    )


def _in_parts(message: Message, has_image: bool = False) -> dict[str, object]:
    image = [{"type": "image"}] if has_image else []
    return {**message, "content": [*image, {"type": "text", "text": message["content"]}]}


def _takes_parts(template: jinja2.Template, special_tokens: Mapping[str, str]) -> bool:
    """Whether a text shows only where it is a part of a message's content: such a template loses a bare one."""
    message = {"role": "user", "content": _PROBE}

    def shows(probe: object) -> bool:
        try:
            return _PROBE in _rendered(template, [probe], special_tokens)
        except Exception:  # a template that refuses one message may take a conversation of another kind
            return False

    return not shows(message) and shows(_in_parts(message))


def compile_template(text: str, special_tokens: Mapping[str, str], origin: str) -> ChatTemplate:
    """Compile a chat template.

    Raises:
        UserError: the text is no valid template.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    try:
        template = environment.from_string(text)
    except jinja2.TemplateError as error:
        raise UserError(f"{origin}: not a valid chat template ({error}). Use --raw to do without it.") from error
    return ChatTemplate(template, special_tokens, origin, _takes_parts(template, special_tokens))


def open_template(package: Package) -> ChatTemplate | None:
    """The chat template of a package; None where it has none.

    Raises:
        UserError: the file is no valid template.
    """
    path = package.chat_template_path
    if path is None or package.manifest.tokenizer is None:
        return None
    return compile_template(path.read_text(encoding="utf-8"), package.manifest.tokenizer.special_tokens, str(path))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
