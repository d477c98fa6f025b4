"""One instance fewer, one more: the planner is asked again, and an even spread shows what would break."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from capplan.errors import InfeasibleError
from capplan.planner.api import plan as make_plan
from capplan.planner.explaining.fleet import Fleet, one_fewer, one_more
from capplan.planner.explaining.rebuild import RebuiltPlan
from capplan.planner.explaining.spread import even_spread
from capplan.spec import Objective, Plan

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Outcome:
    """What a plan does, over all its GPUs.

    Attributes
    ----------
    gpus, usd_per_hour
        Its size and price.
    ttft_p99_s, tpot_mean_ms
        Of the instance where they are longest; None where no request was served.
    throughput_tok_s
        Input and output tokens per second, all instances together.
    holds_until
        Multiple of the planned load up to which every instance holds; None without any load.
    fails
        Whether an instance was found to fail beyond; otherwise nothing larger was tried.
    """

    gpus: int
    usd_per_hour: float | None
    ttft_p99_s: float | None
    tpot_mean_ms: float | None
    throughput_tok_s: float
    holds_until: float | None
    fails: bool


@dataclass(frozen=True)
class WhatIf:
    """One instance fewer, or one more.

    Attributes
    ----------
    change
        Which instance, in words.
    gpus
        GPUs there would be.
    outcome
        Of the plan that the solver `capplan` makes of them; None when there is none.
    holds
        Whether the twin confirms that plan.
    words
        What follows, in a sentence; where there is no plan, why, and what breaks where the load is spread
        evenly all the same.
    """

    change: str
    gpus: int
    outcome: Outcome | None
    holds: bool
    words: str


def outcome_of(plan: Plan) -> Outcome:
    """Return what a plan says of itself."""
    predicted = [group.predicted for group in plan.groups]
    loads = [each.load_over_capacity for each in predicted if each.load_over_capacity]
    return Outcome(
        gpus=plan.totals.gpus,
        usd_per_hour=plan.totals.usd_per_hour,
        ttft_p99_s=max((p.ttft_s.p99 for p in predicted if p.ttft_s.p99 is not None), default=None),
        tpot_mean_ms=max((p.tpot_ms.mean for p in predicted if p.tpot_ms.mean is not None), default=None),
        throughput_tok_s=sum(group.replicas * group.predicted.throughput_tok_s for group in plan.groups),
        holds_until=1.0 / max(loads) if loads else None,
        fails=any(group.binds is not None for group in plan.groups),
    )


def what_if(rebuilt: RebuiltPlan, seed: int, progress: Progress) -> tuple[WhatIf, ...]:
    """Return what one instance fewer and one more would do; nothing fewer than one instance.

    Parameters
    ----------
    rebuilt
        The plan as the planner saw it.
    seed
        Of the search; verification is on one fresh seed.
    progress
        Called with (stage, done, total).
    """
    fewer = one_fewer(rebuilt.problem, rebuilt.pools)
    answers = [] if fewer is None else [_fewer(rebuilt, fewer, seed, progress)]
    return (*answers, _more(one_more(rebuilt.problem, rebuilt.pools), seed, progress))


def _fewer(rebuilt: RebuiltPlan, fleet: Fleet, seed: int, progress: Progress) -> WhatIf:
    try:
        answer = _planned(fleet, fleet.problem.workload.objective, seed, progress)
    except InfeasibleError as error:
        spread = even_spread(rebuilt, fleet, seed)
        return _no_plan(fleet, f"{error}; {spread}" if spread else str(error))
    return _answered(answer, fleet)


def _more(fleet: Fleet, seed: int, progress: Progress) -> WhatIf:
    try:
        # The fewest GPUs would leave it idle: what it is good for shows where latency counts.
        answer = _planned(fleet, Objective.MIN_LATENCY, seed, progress)
    except InfeasibleError as error:
        return _no_plan(fleet, str(error))
    return _answered(answer, fleet, "placed for the shortest mean time to the last token")


def _planned(fleet: Fleet, objective: Objective, seed: int, progress: Progress) -> Plan:
    def report(stage: str, done: int, total: int) -> None:
        progress(f"{fleet.change}: {stage}", done, total)

    wishes = fleet.workload.replace(objective=objective, previous_plan=None)
    only = None if wishes.pools else fleet.problem.profile
    gpus = None if wishes.pools else fleet.gpus
    return make_plan(wishes, gpus=gpus, profile=only, seed=seed, seeds=1, progress=report)


def _no_plan(fleet: Fleet, words: str) -> WhatIf:
    return WhatIf(fleet.change, fleet.gpus, None, holds=False, words=words)


def _answered(answer: Plan, fleet: Fleet, aim: str = "") -> WhatIf:
    outcome = outcome_of(answer)
    failed = [f"{check.id}: {check.note}" for check in answer.verification.groups if not check.ok]
    words = [f"fails, {failed[0]}" if failed else "holds", aim]
    if outcome.gpus < fleet.gpus:
        words.append(f"{outcome.gpus} of them suffice, more are of no use")
    told = "; ".join(word for word in words if word)
    return WhatIf(fleet.change, fleet.gpus, outcome, holds=answer.verification.ok, words=told)
