"""Text to token ids and back, with the package's own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from runners.errors import UserError
from runners.manifest import Tokenizer as TokenizerEntry
from runners.package import Package
from runners.special_tokens import SpecialTokens


class TextCodec:
    """The package's tokenizer together with the ids that its manifest names."""

    def __init__(self, tokenizer: Tokenizer, entry: TokenizerEntry) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = frozenset(entry.eos_ids)
        self._bos_id = entry.bos_id if entry.adds_bos else None

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, begun with the beginning-of-sequence token where the model expects one."""
        ids = self._ids(text, add_special_tokens=True)
        if self._bos_id is not None and ids[:1] != [self._bos_id]:
            return [self._bos_id, *ids]
        return ids

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of text in which every special token is meant as one, as a chat template renders it."""
        return self._ids(text, add_special_tokens=False)

    @cached_property
    def special(self) -> SpecialTokens:
        """What the tokenizer declares to be special."""
        return SpecialTokens(self.tokenizer)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(f"the prompt is not valid UTF-8 text ({error.reason} at {error.start}).") from error
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


def open_tokenizer(package: Package) -> TextCodec:
    """Open the tokenizer of a package.

    Raises:
        UserError: the package has none, or the file is no tokenizer.
    """
    entry = package.manifest.tokenizer
    if entry is None:
        raise UserError(
            f"package '{package.manifest.name}' has no tokenizer, so it cannot take text. "
            "Build it from a source that has tokenizer files."
        )
    path = package.path / entry.file
    try:
        return TextCodec(Tokenizer.from_file(str(path)), entry)
    except Exception as error:  # the library raises plain Exception for whatever is wrong with the file
        raise UserError(f"{path}: not a readable tokenizer ({error}). Build or fetch the package again.") from error


class TextStream:
    """Text of tokens that arrive one by one. Characters of several tokens appear when they are whole."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._stream = DecodeStream(skip_special_tokens=True)
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """The text that ``token`` completes; empty while a character is incomplete."""
        self._pending.append(token)
        try:
            text = self._stream.step(self._codec.tokenizer, token)
        except Exception:  # DecodeStream's own: bytes that turned out not to be UTF-8 changed what came before
            return self.finish()
        if text is None:
            return ""
        self._pending.clear()
        return text

    def finish(self) -> str:
        """The text of an incomplete end, as replacement characters. The stream starts anew."""
        text = self._codec.decode(self._pending)
        self._pending.clear()
        self._stream = DecodeStream(skip_special_tokens=True)
        return text
