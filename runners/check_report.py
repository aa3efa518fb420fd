"""What a check found, as it is written to JSON: figures for each prompt and reference, the limits, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from runners.errors import UserError
from runners.files import write_text
from runners.goldens import RoundingFigures

PositiveFloat = Annotated[float, Field(gt=0)]
Against = Literal["quantized", "unquantized"]


class Strict(BaseModel):
    """Base of every entry: immutable, unknown keys refused; infinities and NaN survive JSON as strings."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class Limits(Strict):
    """Limits of the check against one eager reference. None: reported, not enforced."""

    min_equal_prompts: Annotated[float, Field(ge=0, le=1)] | None = None  # share of prompts with every token equal
    max_margin: PositiveFloat | None = None  # logits, where tokens differ (``Difference.margin``)
    max_logit_difference: PositiveFloat | None = None
    max_mean_kl: PositiveFloat | None = None  # nats, over the steps of a prompt
    max_perplexity_ratio: PositiveFloat | None = None
    max_output_difference: PositiveFloat | None = None  # of cases; the limits below too
    min_equal_top1: Annotated[float, Field(ge=0, le=1)] | None = None  # share of all cases' rows
    min_equal_top5: Annotated[float, Field(ge=0, le=1)] | None = None
    min_cosine: Annotated[float, Field(ge=-1, le=1)] | None = None  # of each case


class QuantizedLimits(Limits):
    """Limits of the check against eager execution of the package's own weights."""

    max_kl_over_rounding: PositiveFloat | None = None  # ``CheckReport.kl_over_rounding``


LimitsKind = TypeVar("LimitsKind", bound=Limits)


class Difference(Strict):
    """A step at which the program chooses another token than the reference."""

    step: int
    wanted: int  # the reference's choice
    got: int  # the program's
    margin: float  # the reference's logit of ``wanted`` less its logit of ``got``
    margin_is_lower_bound: bool  # ``got`` is not among the recorded logits


class Comparison(Strict):
    """The program against one reference, along the golden tokens of one prompt."""

    steps: int
    equal_steps: int
    differences: tuple[Difference, ...]
    max_logit_difference: float
    mean_logit_difference: float
    mean_kl: float  # nats
    max_kl: float
    whole_vocabulary: bool  # False: over the recorded logits, and KL is a lower bound (``runners.metrics``)
    top_k: int | None = None  # logits a step that the program gives: figures are over these; None: all

    @property
    def tokens_equal(self) -> bool:
        """Whether greedy decoding gives the same tokens at every step."""
        return not self.differences

    @property
    def max_margin(self) -> float:
        """The largest margin among the differing steps; 0 where there is none."""
        return max((difference.margin for difference in self.differences), default=0.0)


class PromptReport(Strict):
    """One prompt."""

    name: str
    text: str
    prompt_tokens: int
    finite: bool  # no NaN and no infinity among the program's logits
    quantized: Comparison
    unquantized: Comparison
    rounding: RoundingFigures | None  # of the quantized reference against itself in float64, measured as ``quantized``

    def against(self, name: Against) -> Comparison:
        """The comparison with one of the references."""
        return self.quantized if name == "quantized" else self.unquantized


class CaseComparison(Strict):
    """The program's output against one reference's, over the recorded rows of one case."""

    rows: int
    max_output_difference: float
    mean_output_difference: float
    equal_top1: int | None  # rows with the same largest value; None: the output is no logits
    equal_top5: int | None  # rows with the same five, in any order
    cosine: float | None  # of the embeddings; None: the output is not pooled to one


class CaseReport(Strict):
    """One case: a call of a program without a cache."""

    name: str
    text: str
    inputs: dict[str, list[int]]  # name -> shape
    finite: bool
    quantized: CaseComparison
    unquantized: CaseComparison

    def against(self, name: Against) -> CaseComparison:
        """The comparison with one of the references."""
        return self.quantized if name == "quantized" else self.unquantized


class PerplexityReport(Strict):
    """Perplexity of one text: exp of the mean negative log-likelihood of the scored tokens."""

    scored_tokens: int
    program: float
    quantized: float
    unquantized: float

    def ratio(self, against: Against) -> float:
        """The program's perplexity over a reference's."""
        return self.program / (self.quantized if against == "quantized" else self.unquantized)


class Violation(Strict):
    """One reason why the check failed."""

    against: Against | Literal["itself"]
    rule: str  # a field of ``Limits``, "finite" or "repeatable"
    value: float
    limit: float
    prompt: str | None  # None: over all prompts, or the text
    message: str


class CheckReport(Strict):
    """The whole check."""

    schema_version: Literal[2] = 2
    passed: bool
    prompts: tuple[PromptReport, ...]
    perplexity: PerplexityReport | None
    repeatable: bool  # the first prompt or case, run again after another one, gave bit-identical outputs
    kl_over_rounding: float | None  # ``kl_over_rounding`` of the prompts
    limits_quantized: QuantizedLimits
    limits_unquantized: Limits
    violations: tuple[Violation, ...]
    cases: tuple[CaseReport, ...] = ()
    verified: tuple[PromptReport, ...] = ()  # the same prompts through the method verify; empty: there is none

    @property
    def of_verify(self) -> CheckReport:
        """What was found through the method verify, as a report of its own; it has no verdict of its own."""
        return self.model_copy(
            update={
                "prompts": self.verified,
                "verified": (),
                "cases": (),
                "perplexity": None,
                "repeatable": True,
                "kl_over_rounding": kl_over_rounding(self.verified),
                "violations": (),
            }
        )

    def top_share(self, against: Against, figure: Literal["equal_top1", "equal_top5"]) -> float:
        """Share of the rows of all cases whose likeliest entry, or five, are the reference's."""
        rows = [case.against(against) for case in self.cases]
        return sum(getattr(found, figure) or 0 for found in rows) / sum(found.rows for found in rows)

    def equal_share(self, against: Against) -> float:
        """Share of the prompts on which every greedy token equals the reference's."""
        return sum(prompt.against(against).tokens_equal for prompt in self.prompts) / len(self.prompts)


def kl_over_rounding(prompts: Sequence[PromptReport]) -> float | None:
    """Mean KL of the program against the quantized reference over that of the same weights in float64, over all steps.

    None: there is no prompt, or nothing was measured in float64. A program that is as close to the reference as
    rounding lets any be has about 1.
    """
    pairs = [(prompt.quantized, prompt.rounding) for prompt in prompts if prompt.rounding is not None]
    if not pairs or len(pairs) < len(prompts):
        return None
    program = sum(found.mean_kl * found.steps for found, _ in pairs)
    floor = sum(rounding.mean_kl * found.steps for found, rounding in pairs)
    if floor == 0:
        return 0.0 if program == 0 else math.inf
    return program / floor


def write_report(report: CheckReport, path: Path) -> None:
    """Write a report as JSON, whole or not at all."""
    write_text(path, report.model_dump_json(indent=2) + "\n")


def read_report(path: Path) -> CheckReport:
    """Read what :func:`write_report` wrote.

    Raises:
        UserError: the file is missing or is no such report.
    """
    try:
        return CheckReport.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: the check's report cannot be read ({error.strerror})") from error
    except ValidationError as error:
        raise UserError(f"{path}: not a report of a check ({error.error_count()} faults): {error}") from error


def limits_from_config(settings: dict[str, JsonValue], against: Against) -> Limits:
    """The limits against one reference, from the ``check`` section of a package's configuration.

    Raises:
        UserError: the section holds an unknown limit or a value out of range.
    """
    return _limits(settings, against, Limits)


def quantized_limits_from_config(settings: dict[str, JsonValue]) -> QuantizedLimits:
    """The limits against the quantized reference. Raises as :func:`limits_from_config` does."""
    return _limits(settings, "quantized", QuantizedLimits)


def _limits(settings: dict[str, JsonValue], against: Against, kind: type[LimitsKind]) -> LimitsKind:
    try:
        return kind.model_validate(settings.get(against) or {})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, ("check", against, *first["loc"])))
        raise UserError(f"the package's configuration: {where}: {first['msg']}, got {first['input']!r}") from error
