"""Counts that routers need in constant time: who is at an instance and who waits there, by rank.

Kept only where `Clock.tally` has columns. A request is counted when the router hands it over, before the
instance's scheduler has seen it.
"""

from __future__ import annotations

from capplan.compile import inner
from capplan.serving import State
from capplan.serving.state import ENDING, N_ADMITTED, N_FINISHED, N_PREEMPTED
from capplan.twin.clock import PRESENT, QUEUED, QUEUED_TOKENS, Clock
from capplan.twin.scenario import Costs

# Positions in `Clock.answered`.
ANSWERS = 0
ANSWER_TOKENS = 1


@inner
def keeps_tally(clock: Clock) -> bool:
    """Tell whether anybody asks."""
    return bool(clock.tally.shape[1] > 0)


@inner
def tally_queued(clock: Clock, rank: int, requests: int, tokens: int) -> None:
    """Count requests that join the queue, or leave it where the number is negative."""
    clock.tally[QUEUED, rank] += requests
    clock.tally[QUEUED_TOKENS, rank] += tokens


@inner
def tally_present(clock: Clock, rank: int, requests: int) -> None:
    """Count requests that come to the instance, or leave it where the number is negative."""
    clock.tally[PRESENT, rank] += requests


@inner
def tally_step(state: State, costs: Costs, clock: Clock) -> None:
    """Count the admissions and preemptions of a step that was decided."""
    for i in range(state.counters[N_ADMITTED]):
        row = state.lists.admitted[i]
        tally_queued(clock, costs.rank[state.rows.adapter[row]], -1, -state.rows.prompt[row])
    for i in range(state.counters[N_PREEMPTED]):
        row = state.lists.preempted[i]
        if state.rows.since[row] != ENDING:  # whose last token is in flight has ended already
            tally_queued(clock, costs.rank[state.rows.adapter[row]], 1, state.rows.prompt[row])


@inner
def tally_ends(state: State, costs: Costs, clock: Clock) -> None:
    """Count the requests that a committed step ended."""
    for i in range(state.counters[N_FINISHED]):
        row = state.lists.finished[i]
        tally_present(clock, costs.rank[state.rows.adapter[row]], -1)
        clock.answered[ANSWERS] += 1
        clock.answered[ANSWER_TOKENS] += state.rows.target[row]
