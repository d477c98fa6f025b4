"""How the requests of an adapter follow each other in time: a process, and how its rate moves."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Strict, Tag, model_validator

from capplan.spec.base import SpecModel, broken
from capplan.spec.types import Fraction, NonNegative, Positive, Rank, rule


class Arrivals(StrEnum):
    """Processes that need no more than their name."""

    POISSON = "poisson"
    DETERMINISTIC = "deterministic"


_PROCESSES = ("poisson", "deterministic", "gamma", "weibull", "lognormal", "unpredictable")
_MODULATIONS = ("steps", "diurnal", "burst", "shifting_skew")
_NEED_CV = frozenset({"gamma", "weibull", "lognormal"})

Spread = Annotated[
    float, Strict(), Field(ge=0.01, le=50), rule("must be a number from 0.01 to 50, such as 3")
]
AtLeastOne = Annotated[float, Strict(), Field(ge=1), rule("must be a finite number >= 1")]
LogSigma = Annotated[float, Strict(), Field(gt=0, le=5), rule("must be a number above 0 and at most 5")]
Memory = Annotated[
    int, Strict(), Field(ge=1, le=10_000), rule("must be a whole number from 1 to 10000, such as 4")
]
Phase = Annotated[float, Strict(), Field(ge=0, lt=1), rule("must be a number from 0 to below 1")]


class Steps(SpecModel):
    """A rate that jumps at given times; factors are relative, the mean rate stays the adapter's."""

    kind: Literal["steps"] = Field("steps", description="Which modulation: steps.")
    steps: tuple[tuple[NonNegative, NonNegative], ...] = Field(
        min_length=1,
        description="Pairs [t_s, factor], ascending from 0: from t_s on the rate has this factor.",
    )
    period_s: Positive | None = Field(
        None, description="Seconds after which the steps repeat; absent: never, they span what is drawn."
    )

    @model_validator(mode="after")
    def _one_after_the_other(self) -> Self:
        times = [t_s for t_s, _ in self.steps]
        if times[0] != 0:
            raise broken("must begin at 0 seconds", key=("steps", 0, 0), value=times[0])
        for index, (before, after) in enumerate(pairwise(times), start=1):
            if after <= before:
                raise broken("must ascend", key=("steps", index, 0), value=after)
        if self.period_s is not None and self.period_s <= times[-1]:
            raise broken("must be after the last step", key=("period_s",), value=self.period_s)
        if not any(factor for _, factor in self.steps):
            raise broken("must have a factor above 0", key=("steps",))
        return self


class Diurnal(SpecModel):
    """A rate that swings as a sine, by ``amplitude`` times its mean."""

    kind: Literal["diurnal"] = Field("diurnal", description="Which modulation: diurnal.")
    amplitude: Fraction = Field(
        description="Swing over mean, 0 to 1; the peak is 1 + amplitude times the mean."
    )
    period_s: Positive = Field(86_400.0, description="Seconds from peak to peak.")
    phase: Phase = Field(0.0, description="Share of a period that has passed at the start; 0.25 is the peak.")


class Burst(SpecModel):
    """A rate that is ``factor`` times higher during bursts than between them; its mean is the adapter's."""

    kind: Literal["burst"] = Field("burst", description="Which modulation: burst.")
    factor: AtLeastOne = Field(description="Rate inside a burst over the rate outside.")
    every_s: Positive = Field(description="Seconds from one burst's beginning to the next one's.")
    length_s: Positive = Field(description="Seconds a burst lasts.")
    at_s: NonNegative = Field(0.0, description="Seconds from the start to the first burst.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.at_s + self.length_s > self.every_s:
            raise broken("a burst must end before every_s: at_s + length_s must not exceed it")
        return self


class ShiftingSkew(SpecModel):
    """Popularity that moves from large ranks to small ones, linearly in time (LoRAServe, section V-E).

    Adapters of rank ``from_rank`` and above begin at (1 + swing) times their rate and end at (1 - swing);
    those of ``to_rank`` and below the other way round; the rest keep theirs. Each one's mean is its rate.
    """

    kind: Literal["shifting_skew"] = Field("shifting_skew", description="Which modulation: shifting_skew.")
    from_rank: Rank = Field(description="Least rank of the adapters that lose popularity.")
    to_rank: Rank = Field(description="Largest rank of the adapters that gain popularity.")
    swing: Fraction = Field(
        0.6, description="How far rates move, 0 to 1; 0.6 is LoRAServe's 1/2 to 1/8 of all requests."
    )
    over_s: Positive | None = Field(
        None, description="Seconds the shift takes; absent: all that is drawn. Afterwards rates stay."
    )

    @model_validator(mode="after")
    def _apart(self) -> Self:
        if self.to_rank >= self.from_rank:
            raise broken(
                f"must be below from_rank, which is {self.from_rank}", key=("to_rank",), value=self.to_rank
            )
        return self


def _kind_of(value: Any) -> str:
    kind = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)
    return f"<{kind}>"


def _known_kind(value: Any) -> Any:
    if isinstance(value, SpecModel):
        return value
    if not isinstance(value, Mapping):
        raise broken("must be a mapping of keys to values")
    if value.get("kind") not in _MODULATIONS:
        raise broken(f"must be one of {', '.join(_MODULATIONS)}", key=("kind",), value=value.get("kind"))
    return value


Modulation: TypeAlias = Annotated[
    Annotated[
        Annotated[Steps, Tag("<steps>")]
        | Annotated[Diurnal, Tag("<diurnal>")]
        | Annotated[Burst, Tag("<burst>")]
        | Annotated[ShiftingSkew, Tag("<shifting_skew>")],
        Discriminator(_kind_of),
    ],
    BeforeValidator(_known_kind),
]


class Renewal(SpecModel):
    """Independent gaps of one distribution, begun long before the start, under a rate that may move."""

    process: Literal["poisson", "deterministic", "gamma", "weibull", "lognormal"] = Field(
        "poisson", description="Distribution of the gaps between requests of one adapter."
    )
    cv: Spread | None = Field(
        None, description="Standard deviation of the gaps over their mean; for gamma, weibull and lognormal."
    )
    modulation: Modulation | None = Field(None, description="How the rate moves; absent: it does not.")

    @model_validator(mode="after")
    def _spread_where_there_is_a_choice(self) -> Self:
        if self.process in _NEED_CV and self.cv is None:
            raise broken(f"is required for {self.process}", key=("cv",))
        if self.process not in _NEED_CV and self.cv is not None:
            raise broken(f"does not go with {self.process}", key=("cv",), value=self.cv)
        return self


class Unpredictable(SpecModel):
    """Rates nobody can foresee (digital-twin paper, section 8.2).

    Every ``every_s`` seconds each adapter, independently, draws whether its gaps are exponential or
    log-normal, and from the second time on multiplies or divides its rate by ``factor``.
    """

    process: Literal["unpredictable"] = Field("unpredictable", description="Which process: unpredictable.")
    every_s: Positive = Field(300.0, description="Seconds between two redraws.")
    factor: AtLeastOne = Field(2.0, description="What a rate is multiplied or divided by.")
    clip: AtLeastOne = Field(
        7.5, description="Rates stay within the first one / clip and the first one x clip."
    )
    sigma: LogSigma = Field(1.0, description="Standard deviation of the logarithm of log-normal gaps.")
    lognormal_gaps: Literal["mean_preserving", "published_client"] = Field(
        "mean_preserving",
        description=(
            "mean_preserving: mean 1 / rate. published_client: LogN(0, rate) seconds, as the paper's program "
            "draws them, whose mean forgets the rate; sigma is not used."
        ),
    )


def _form(value: Any) -> str:
    if not isinstance(value, Mapping | SpecModel):
        return "<name>"
    process = value.get("process") if isinstance(value, Mapping) else getattr(value, "process", None)
    return "<unpredictable>" if process == "unpredictable" else "<renewal>"


def _shortest(value: Arrivals | Renewal | Unpredictable) -> Arrivals | Renewal | Unpredictable:
    """Return the name alone where it says everything, so that equal processes have equal digests."""
    if isinstance(value, Renewal) and value.cv is None and value.modulation is None:
        return Arrivals(value.process)
    return value


def _known_process(value: Any) -> Any:
    if isinstance(value, str) and value in _PROCESSES and value not in set(Arrivals):
        more = ", cv: 2" if value in _NEED_CV else ""
        raise broken(f"must be written as {{process: {value}{more}}}")
    if isinstance(value, Mapping) and value.get("process", "poisson") not in _PROCESSES:
        raise broken(f"must be one of {', '.join(_PROCESSES)}", key=("process",), value=value["process"])
    return value


ArrivalProcess: TypeAlias = Annotated[
    Annotated[
        Annotated[Arrivals, Tag("<name>")]
        | Annotated[Renewal, Tag("<renewal>")]
        | Annotated[Unpredictable, Tag("<unpredictable>")],
        Discriminator(_form),
    ],
    BeforeValidator(_known_process),
    AfterValidator(_shortest),
]


class Stickiness(SpecModel):
    """Temporal locality: some requests ask for an adapter that was asked for just before."""

    last: Memory = Field(description="How many of the adapters asked for last may be repeated.")
    probability: Fraction = Field(description="Probability that a request repeats one of them.")
