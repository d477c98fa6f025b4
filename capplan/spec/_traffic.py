"""Traffic of adapters: arrival processes, rate modulation, popularity laws."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Strict, Tag, model_validator

from capplan.errors import InputError
from capplan.spec._validation import (
    Fraction,
    Many,
    NonNegative,
    Positive,
    Rank,
    SpecModel,
    at_most,
    rule,
    rule_error,
)


class Arrivals(StrEnum):
    """Processes without parameters."""

    POISSON = "poisson"
    DETERMINISTIC = "deterministic"


_PROCESSES = ("poisson", "deterministic", "gamma", "weibull", "lognormal", "unpredictable")

_MODULATIONS = ("steps", "diurnal", "burst", "shifting_skew")

_NEED_CV = frozenset({"gamma", "weibull", "lognormal"})

Spread = Annotated[
    float, Strict(), Field(ge=0.01, le=50), rule("must be a number from 0.01 to 50, such as 3")
]

AtLeastOne = Annotated[float, Strict(), Field(ge=1), rule("must be a finite number >= 1"), at_most(1e6)]

LogSigma = Annotated[float, Strict(), Field(gt=0, le=5), rule("must be a number above 0 and at most 5")]

StickyWindow = Annotated[
    int, Strict(), Field(ge=1, le=10_000), rule("must be a whole number from 1 to 10000, such as 4")
]

Phase = Annotated[float, Strict(), Field(ge=0, lt=1), rule("must be a number from 0 to below 1")]


class Steps(SpecModel):
    """A rate that jumps at given times; factors are relative, the mean rate stays the adapter's."""

    kind: Literal["steps"] = Field(default="steps", description="Which modulation: steps.")
    steps: Many[tuple[NonNegative, NonNegative]] = Field(
        min_length=1,
        description="Pairs [t_s, factor], ascending from 0: from t_s on the rate has this factor.",
    )
    period_s: Positive | None = Field(
        default=None,
        description="Seconds after which the steps repeat; absent: never, they span what is drawn.",
    )

    @model_validator(mode="after")
    def _one_after_the_other(self) -> Self:
        times = [t_s for t_s, _ in self.steps]
        if times[0] != 0:
            raise rule_error("must begin at 0 seconds", key=("steps", 0, 0), value=times[0])
        for index, (before, after) in enumerate(pairwise(times), start=1):
            if after <= before:
                raise rule_error("must ascend", key=("steps", index, 0), value=after)
        if self.period_s is not None and self.period_s <= times[-1]:
            raise rule_error("must be after the last step", key=("period_s",), value=self.period_s)
        if not any(factor for _, factor in self.steps):
            raise rule_error("must have a factor above 0", key=("steps",))
        return self


class Diurnal(SpecModel):
    """A rate that swings as a sine, by ``amplitude`` times its mean."""

    kind: Literal["diurnal"] = Field(default="diurnal", description="Which modulation: diurnal.")
    amplitude: Fraction = Field(
        description="Swing over mean, 0 to 1; the peak is 1 + amplitude times the mean."
    )
    period_s: Positive = Field(default=86_400.0, description="Seconds from peak to peak.")
    phase: Phase = Field(
        default=0.0, description="Share of a period that has passed at the start; 0.25 is the peak."
    )


class Burst(SpecModel):
    """A rate that is ``factor`` times higher during bursts than between them; its mean is the adapter's."""

    kind: Literal["burst"] = Field(default="burst", description="Which modulation: burst.")
    factor: AtLeastOne = Field(description="Rate inside a burst over the rate outside.")
    every_s: Positive = Field(description="Seconds from one burst's beginning to the next one's.")
    length_s: Positive = Field(description="Seconds a burst lasts.")
    at_s: NonNegative = Field(default=0.0, description="Seconds from the start to the first burst.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.at_s + self.length_s > self.every_s:
            raise rule_error("a burst must end before every_s: at_s + length_s must not exceed it")
        return self


class ShiftingSkew(SpecModel):
    """Popularity that moves from large ranks to small ones, linearly in time (LoRAServe, section V-E).

    Adapters of rank ``from_rank`` and above begin at (1 + swing) times their rate and end at (1 - swing);
    those of ``to_rank`` and below the other way round; the rest keep theirs. Each one's mean is its rate.
    """

    kind: Literal["shifting_skew"] = Field(
        default="shifting_skew", description="Which modulation: shifting_skew."
    )
    from_rank: Rank = Field(description="Least rank of the adapters that lose popularity.")
    to_rank: Rank = Field(description="Largest rank of the adapters that gain popularity.")
    swing: Fraction = Field(
        default=0.6, description="How far rates move, 0 to 1; 0.6 is LoRAServe's 1/2 to 1/8 of all requests."
    )
    over_s: Positive | None = Field(
        default=None, description="Seconds the shift takes; absent: all that is drawn. Afterwards rates stay."
    )

    @model_validator(mode="after")
    def _apart(self) -> Self:
        if self.to_rank >= self.from_rank:
            raise rule_error(
                f"must be below from_rank, which is {self.from_rank}", key=("to_rank",), value=self.to_rank
            )
        return self


def _modulation_tag(value: Any) -> str:
    kind = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)
    return f"<{kind}>"


def _known_kind(value: Any) -> Any:
    if isinstance(value, SpecModel):
        return value
    if not isinstance(value, Mapping):
        raise rule_error("must be a mapping of keys to values")
    if value.get("kind") not in _MODULATIONS:
        raise rule_error(f"must be one of {', '.join(_MODULATIONS)}", key=("kind",), value=value.get("kind"))
    return value


Modulation: TypeAlias = Annotated[
    Annotated[
        Annotated[Steps, Tag("<steps>")]
        | Annotated[Diurnal, Tag("<diurnal>")]
        | Annotated[Burst, Tag("<burst>")]
        | Annotated[ShiftingSkew, Tag("<shifting_skew>")],
        Discriminator(_modulation_tag),
    ],
    BeforeValidator(_known_kind),
]


class Renewal(SpecModel):
    """Independent gaps of one distribution, begun long before the start, under a rate that may move."""

    process: Literal["poisson", "deterministic", "gamma", "weibull", "lognormal"] = Field(
        default="poisson", description="Distribution of the gaps between requests of one adapter."
    )
    cv: Spread | None = Field(
        default=None,
        description="Standard deviation of the gaps over their mean; for gamma, weibull and lognormal.",
    )
    modulation: Modulation | None = Field(
        default=None, description="How the rate moves; absent: it does not."
    )

    @model_validator(mode="after")
    def _spread_where_there_is_a_choice(self) -> Self:
        if self.process in _NEED_CV and self.cv is None:
            raise rule_error(f"is required for {self.process}", key=("cv",))
        if self.process not in _NEED_CV and self.cv is not None:
            raise rule_error(f"does not go with {self.process}", key=("cv",), value=self.cv)
        return self


class Unpredictable(SpecModel):
    """Random changes of rates and gap distributions (digital-twin paper, section 8.2).

    Every ``every_s`` seconds each adapter, independently, draws whether its gaps are exponential or
    log-normal, and from the second time on multiplies or divides its rate by ``factor``.
    """

    process: Literal["unpredictable"] = Field(
        default="unpredictable", description="Which process: unpredictable."
    )
    every_s: Positive = Field(default=300.0, description="Seconds between two redraws.")
    factor: AtLeastOne = Field(default=2.0, description="What a rate is multiplied or divided by.")
    clip: AtLeastOne = Field(
        default=7.5, description="Rates stay within the first one / clip and the first one x clip."
    )
    sigma: LogSigma = Field(
        default=1.0, description="Standard deviation of the logarithm of log-normal gaps."
    )
    lognormal_gaps: Literal["mean_preserving", "published_client"] = Field(
        default="mean_preserving",
        description=(
            "mean_preserving: mean 1 / rate. published_client: LogN(0, rate) seconds, as the paper's program "
            "draws them, whose mean forgets the rate; sigma is not used."
        ),
    )


def _process_tag(value: Any) -> str:
    if not isinstance(value, Mapping | SpecModel):
        return "<name>"
    process = value.get("process") if isinstance(value, Mapping) else getattr(value, "process", None)
    return "<unpredictable>" if process == "unpredictable" else "<renewal>"


def _canonical(value: Arrivals | Renewal | Unpredictable) -> Arrivals | Renewal | Unpredictable:
    """Return the name alone where it says everything, so that equal processes have equal digests."""
    if isinstance(value, Renewal) and value.cv is None and value.modulation is None:
        return Arrivals(value.process)
    return value


def _known_process(value: Any) -> Any:
    if isinstance(value, str) and value in _PROCESSES and value not in set(Arrivals):
        more = ", cv: 2" if value in _NEED_CV else ""
        raise rule_error(f"must be written as {{process: {value}{more}}}")
    if isinstance(value, Mapping) and value.get("process", "poisson") not in _PROCESSES:
        raise rule_error(f"must be one of {', '.join(_PROCESSES)}", key=("process",), value=value["process"])
    return value


ArrivalProcess: TypeAlias = Annotated[
    Annotated[
        Annotated[Arrivals, Tag("<name>")]
        | Annotated[Renewal, Tag("<renewal>")]
        | Annotated[Unpredictable, Tag("<unpredictable>")],
        Discriminator(_process_tag),
    ],
    BeforeValidator(_known_process),
    AfterValidator(_canonical),
]


class Stickiness(SpecModel):
    """Temporal locality: some requests repeat a recently used adapter."""

    last: StickyWindow = Field(description="Number of recently used adapters that may be repeated.")
    probability: Fraction = Field(description="Probability that a request repeats one of them.")


Exponent = Annotated[float, Strict(), Field(ge=0, le=50), rule("must be a number from 0 to 50, such as 1")]

Alpha = Annotated[float, Strict(), Field(gt=0, le=1), rule("must be a number above 0 and at most 1")]


def zipf(adapters: int, s: float) -> tuple[float, ...]:
    """Return shares in proportion to rank^-s: 0 is uniform, 1 is Zipf's law (Chameleon, LoRAServe).

    Parameters
    ----------
    adapters : int
        At least 1; the first adapter is the most popular one.
    s : float
        At least 0.

    Returns
    -------
    tuple of float
        One share per adapter; they sum to 1.
    """
    _check_parameters(adapters, s >= 0, "s", s, "must be a number >= 0")
    return _normalized([(k + 1.0) ** -s for k in range(adapters)])


def power_law(adapters: int, alpha: float) -> tuple[float, ...]:
    """Return S-LoRA's shares: adapter floor(N U^(1 / alpha)) with U uniform; 1 is uniform, less is skewer.

    The first adapter is the most popular one. The first k of N adapters have (k / N)^alpha together; this is
    not the exponent of :func:`zipf`.
    """
    _check_parameters(adapters, 0 < alpha <= 1, "alpha", alpha, "must be a number above 0 and at most 1")
    together = [(k / adapters) ** alpha for k in range(adapters + 1)]
    return _normalized([high - low for low, high in pairwise(together)])


def exponential(adapters: int, b: float) -> tuple[float, ...]:
    """Return shares in proportion to exp(-b k) for k = 0, 1, ... (LoRAServe's exponential popularity).

    The first adapter is the most popular one; with b = 0 all are equal.
    """
    _check_parameters(adapters, b >= 0, "b", b, "must be a number >= 0")
    return _normalized([math.exp(-b * k) for k in range(adapters)])


def _check_parameters(adapters: int, holds: bool, name: str, value: float, words: str) -> None:
    if adapters < 1:
        raise InputError("must be a whole number >= 1", adapters, "adapters")
    if not holds or not math.isfinite(value):
        raise InputError(words, value, name)


def _normalized(weights: list[float]) -> tuple[float, ...]:
    total = math.fsum(weights)
    return tuple(weight / total for weight in weights)


class Popularity(SpecModel):
    """The law by which a group of adapters shares out its requests; exactly one is given."""

    zipf: Exponent | None = Field(default=None, description="Shares in proportion to rank^-s; 0 is uniform.")
    power_law: Alpha | None = Field(
        default=None,
        description="S-LoRA's alpha: the first k of N have (k / N)^alpha together; 1 is uniform.",
    )
    exponential: Exponent | None = Field(
        default=None, description="Shares in proportion to exp(-b k), k from 0."
    )

    @model_validator(mode="after")
    def _one_law(self) -> Self:
        if sum(law is not None for law in (self.zipf, self.power_law, self.exponential)) != 1:
            raise rule_error("must give exactly one of zipf, power_law, exponential")
        return self

    def shares(self, adapters: int) -> tuple[float, ...]:
        """Return one share per adapter, the most popular first; they sum to 1."""
        if self.zipf is not None:
            return zipf(adapters, self.zipf)
        if self.power_law is not None:
            return power_law(adapters, self.power_law)
        return exponential(adapters, self.exponential or 0.0)
