"""What keeps one peer from taking part; the others go on."""

from __future__ import annotations


class PeerError(RuntimeError):
    """A peer cannot be installed, made or run. The text is one line for the report."""


def last_line(text: str) -> str:
    """The line of a program's output that says most: the last with ``error`` in it, else the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() and "warning" not in line.lower()]
    return (errors or lines or ["no message"])[-1][:300]
