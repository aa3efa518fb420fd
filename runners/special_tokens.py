"""Special tokens that someone typed: text, as any other, beside those that a chat template writes.

A tokenizer cannot tell them apart in a rendered conversation. So the typed ones are hidden while the template renders;
what the tokenizer finds special in the result is the template's, and gets marks that nobody could have typed; and a
copy of the tokenizer that takes special tokens for text encodes the whole at once, with the marks as tokens of the same
flags. What a normalizer or a pre-tokenizer does at the border of a special token happens there too, and only there.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tokenizers import AddedToken, Tokenizer

_PRIVATE_USE = 0xF0000  # 65,534 characters from here on; templates neither strip them nor change their case
_LETTERS = "abcdefghijklmnopqrstuvwxyz"  # normalizers leave them alone


@dataclass(frozen=True)
class _Marked:
    """A tokenizer that takes special tokens for text, and tokens of the same flags in their stead."""

    tokenizer: Tokenizer
    marks: dict[int, str]  # id of a special token -> mark
    ids: dict[int, int]  # id of a mark -> id of the special token


class SpecialTokens:
    """The special tokens of a tokenizer, those that it declares to be special."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens = {id_: token for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        contents = sorted((token.content for token in self._tokens.values()), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, contents)))
        key = "".join(chr(_PRIVATE_USE + secrets.randbelow(65_000)) for _ in range(8))
        self._hidden = {content: f"{key}{chr(_PRIVATE_USE + place)}" for place, content in enumerate(contents)}

    def are_in(self, text: str, ids: Sequence[int]) -> bool:
        """Whether ``text``, which the tokenizer gives ``ids``, holds any: literally, or by what normalization makes."""
        return bool(self._tokens) and (
            self._pattern.search(text) is not None or any(token in self._tokens for token in ids)
        )

    def hide(self, text: str) -> str:
        """Put something in place of each that a template takes for a character or two of text."""
        return self._pattern.sub(lambda found: self._hidden[found[0]], text)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``: what is special in it is, and what is hidden in it is text."""
        marked = self._marked
        text = self._with_marks(text, marked.marks)
        for content, hidden in self._hidden.items():
            text = text.replace(hidden, content)
        return [marked.ids.get(token, token) for token in marked.tokenizer.encode(text, add_special_tokens=False).ids]

    def _with_marks(self, text: str, marks: dict[int, str]) -> str:
        """``text`` with a mark where the tokenizer finds a special token by its name (and not an unknown character)."""
        found = self._tokenizer.encode(text, add_special_tokens=False)
        pieces, end = [], 0
        for token, (start, stop) in zip(found.ids, found.offsets, strict=True):
            name = self._tokens[token].content if token in self._tokens else ""
            at = text.find(name, max(start, end), stop) if name else -1  # a token may take the spaces around it
            if at >= 0:
                pieces += [text[end:at], marks[token]]
                end = at + len(name)
        return "".join([*pieces, text[end:]])

    @cached_property
    def _marked(self) -> _Marked:
        copy = Tokenizer.from_str(self._tokenizer.to_str())
        copy.encode_special_tokens = True  # the library's name for taking them as text
        key = "".join(secrets.choice(_LETTERS) for _ in range(24))
        marks, ids = {}, {}
        for place, (special, token) in enumerate(self._tokens.items()):
            mark = key + "".join(_LETTERS[int(digit)] for digit in f"{place:08d}")
            copy.add_tokens([_like(token, mark)])
            added = copy.token_to_id(mark)
            assert added is not None, "just added"
            marks[special], ids[added] = mark, special
        return _Marked(copy, marks, ids)


def _like(token: AddedToken, content: str) -> AddedToken:
    return AddedToken(
        content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=False,
    )
