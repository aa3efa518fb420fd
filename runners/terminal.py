"""The terminal's side of the commands: what a user gives on it, and what goes to standard output."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rich.console import Console

from runners.errors import UserError


def prompt_text(prompt: str) -> str:
    """The prompt itself, or standard input for '-'; without the line end that a shell appends.

    Raises:
        UserError: standard input is empty or no UTF-8.
    """
    if prompt != "-":
        return prompt
    try:
        text = sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not valid UTF-8 text: {error}.") from error
    if not text.strip():
        raise UserError("the prompt on standard input is empty: give some text.")
    return text


def write(text: str) -> None:
    """Send text to standard output at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def lines(notes: Console, first: str | None) -> Iterator[str]:
    """The user's turns: the prompt of the command line, then lines of standard input until it ends."""
    if first is not None:
        yield first
    while True:
        if sys.stdin.isatty():
            notes.print("> ", end="", style="bold")
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:  # perhaps meant for an answer that had just ended: it costs a line, not the chat
            notes.print("\n/exit ends the conversation", style="dim")
            continue
        if not line:
            return
        yield line
