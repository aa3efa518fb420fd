"""``docs/zoo.md``, made of the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.zoo.build import LENGTH
from tests.zoo.greedy import BOUND
from tests.zoo.proofs import PROOFS
from tests.zoo.row import Result, Row

HEADER = """# Model zoo

Which families of transformers' models become programs here, and what of them runs outside XNNPACK. `make zoo` wrote
this page (within an hour on two cores). `make test` builds a part of the rows again, and fails where this page says
something else. Every model is a real architecture, of two layers or so, with small **random** weights: a row says that
the architecture works, not how fast or how good a model is.

A row is one family with its cache in one place (`cache.placement`), or with none, where the model keeps nothing between
calls. What **Proven** means is said with each task; the bound of all differences is {bound:g} standard deviations of
eager PyTorch's output, and a cache holds {length} tokens.

**Tokens** is how many tokens one call takes at most: the cache's length, or the smallest window, or one where the
model's own code cannot be traced for any number of them (see the end). **Attention** is what `export.attention: auto`
chose to read a cache. **Delegates** counts the parts that XNNPACK runs; the operators of the last column run one by
one; of a branch both sides' delegates and operators are counted, and each call runs one side. Where a program has more
methods than one, both are given of each.

"""
_STAGES = ("exports", "lowers", "decodes")
_COLUMNS = ("Family", "Placement", "Exports", "Lowers", "Proven", "Cache", "Attention", "Tokens", "Delegates")
_LAST = "Undelegated operators"


def page(rows: Sequence[Row], results: Mapping[str, Result]) -> str:
    """The whole page: a table a task, then what does not work and why."""
    text = HEADER.format(bound=BOUND, length=LENGTH)
    for task in dict.fromkeys(row.family.task for row in rows):
        text += (
            f"## {task}\n\n{PROOFS[task].says}\n| {' | '.join((*_COLUMNS, _LAST))} |\n|{'---|' * (len(_COLUMNS) + 1)}\n"
        )
        text += "".join(_line(row, results[row.key]) for row in rows if row.family.task == task) + "\n"
    return text + _limits(rows, results)


def _line(row: Row, result: Result) -> str:
    cells = [
        row.family.name,
        row.placement,
        *("yes" if getattr(result, stage) else "**no**" for stage in _STAGES),
        ", ".join(result.cache),
        result.attention,
        str(result.tokens_a_call or ""),
        _of_each_method({method: str(count) for method, count in result.delegates.items()}),
        _of_each_method({method: _counted(found) for method, found in result.undelegated.items()}),
    ]
    return f"| {' | '.join(cells)} |\n"


def _of_each_method(cells: Mapping[str, str]) -> str:
    """The only method's, or each with its name."""
    named = [f"**{method}** {cell}" for method, cell in cells.items()]
    return "<br>".join(named if len(named) > 1 else cells.values())


def _counted(counts: Mapping[str, int]) -> str:
    """The most frequent operators first, without the namespace of most."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} {name.removeprefix('aten::')}" for name, count in ordered) or "none"


def _limits(rows: Sequence[Row], results: Mapping[str, Result]) -> str:
    lines = []
    for row in rows:
        if row.family.cannot is not None:
            lines.append(f"- **{row.key}**: {row.family.cannot.why} Error: `{results[row.key].error}`\n")
    for family in dict.fromkeys(row.family for row in rows):
        if family.longer is not None:
            words = f"torch.export's error: `… {family.longer.error} …`"
            lines.append(f"- **{family.name}**, more than one token a call: {family.longer.why} {words}\n")
    head = "## What does not work\n\nEach of these is held by a test that fails once it works.\n\n"
    return head + "".join(lines) if lines else ""
