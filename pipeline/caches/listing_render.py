"""The table that ``pteline caches`` prints."""

from __future__ import annotations

from collections.abc import Sequence

import transformers
from rich.table import Table

from pipeline.caches.listing import ListedClass


def render(listed: Sequence[ListedClass]) -> Table:
    """Return the table: one row a class, with its leaves and static attributes, or the reason why it has none."""
    table = Table(title=f"Cache classes of transformers {transformers.__version__}", title_justify="left", expand=True)
    table.add_column("Class", overflow="fold", ratio=2)
    table.add_column("Registered")
    table.add_column("Leaves; static attributes: or why not", ratio=3)
    for row in listed:
        table.add_row(row.name, "yes" if row.registered else "no", _what(row))
    return table


def _what(row: ListedClass) -> str:
    if row.reason is not None:
        return row.reason
    leaves = ", ".join(row.leaves) or "none: it has no state"
    return f"{leaves}; {', '.join(row.static)}" if row.static else leaves
