"""``docs/zoo.md``, made of the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.zoo.build import LENGTH
from tests.zoo.row import Result, Row
from tests.zoo.text_generation import BOUND

HEADER = """# Model zoo

Which families of transformers' models become programs here, and what of them runs outside XNNPACK. `make zoo` wrote
this page (within an hour on two cores). `make test` builds a part of the rows again, and fails where this page says
something else. Every model is a real architecture, of two layers or so, with small **random** weights: a row says that
the architecture works, not how fast or how good a model is.

A row is one family with its cache in one place (`cache.placement`). **Decodes** means that on one loaded program, after
prompts of 17, 5 and 1 tokens,

- 24 greedy tokens are those of eager PyTorch with transformers' own cache, and no logit differs by more than {bound:g}
  standard deviations of the logits over the vocabulary;
- windows and chunks of 8 tokens are crossed, and the first prompt goes on to the last position of the cache ({length});
- each prompt gives, bit for bit, what a freshly loaded program gives, whatever the one before it left in the cache;
  with `io` the cache tensors are filled with other numbers before each prompt.

**Tokens** is how many tokens one call takes at most: the cache's length, or the smallest window, or one where the
model's own code cannot be traced for any number of them (see the end). **Attention** is what `export.attention: auto`
chose. **Delegates** counts the parts that XNNPACK runs; the operators of the last column run one by one.

"""
_STAGES = ("exports", "lowers", "decodes")
_COLUMNS = ("Family", "Placement", "Exports", "Lowers", "Decodes", "Cache", "Attention", "Tokens", "Delegates")
_LAST = "Undelegated operators"


def page(rows: Sequence[Row], results: Mapping[str, Result]) -> str:
    """The whole page: a table a task, then what does not work and why."""
    text = HEADER.format(bound=BOUND, length=LENGTH)
    for task in dict.fromkeys(row.family.task for row in rows):
        text += f"## {task}\n\n| {' | '.join((*_COLUMNS, _LAST))} |\n|{'---|' * (len(_COLUMNS) + 1)}\n"
        text += "".join(_line(row, results[row.key]) for row in rows if row.family.task == task) + "\n"
    return text + _limits(rows, results)


def _line(row: Row, result: Result) -> str:
    cells = [
        row.family.name,
        row.placement if len(row.family.placements) > 1 else "",
        *("yes" if getattr(result, stage) else "**no**" for stage in _STAGES),
        ", ".join(result.cache),
        result.attention,
        str(result.tokens_a_call or ""),
        ", ".join(f"{name} {count}" for name, count in result.delegates.items()),
        ", ".join(f"{count} {_short(name)}" for name, count in _most_first(result.undelegated)),
    ]
    if len(result.delegates) == 1:
        cells[-2] = str(next(iter(result.delegates.values())))
    return f"| {' | '.join(cells)} |\n"


def _most_first(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _short(name: str) -> str:
    """An operator's name without the namespace of most."""
    return name.removeprefix("aten::")


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
