"""``python -m tests.zoo FOLDER``: make the committed results and the table of what a run of all rows left there."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.zoo import results
from tests.zoo.registry import ROWS
from tests.zoo.table import page


def main(folder: Path) -> None:
    """Take the results of every row, which must all be there."""
    found = {}
    for row in ROWS:
        found |= results.read(folder / f"{row.key}.json")
    results.write(found)
    results.TABLE.write_text(page(ROWS, found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
