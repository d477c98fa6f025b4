"""dLoRA's migration: when, how many, which, and that the engines stay whole."""

import math

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from capplan._jit import jit
from capplan.serving import Limits, State, withdraw
from capplan.serving import state as s
from capplan.serving.routers import Dlora, to_move
from capplan.testing import check_integrity
from capplan.testing._integrity import running_rows, waiting_rows
from capplan.twin.cluster import Instance, simulate_cluster
from capplan.twin.cluster._python_loop import unseen_requests
from capplan.twin.cluster._routers import build_rule
from capplan.twin.cluster._run import run_laid
from capplan.twin.cluster._scenario import ClusterScenario
from capplan.twin.cluster._steps import lay_out
from capplan.twin.instance import _trace as t
from capplan.twin.instance._clock import PRESENT, QUEUED
from tests.serving.worlds import World, play, worlds
from tests.twin.cluster.scenarios import clusters
from tests.twin.cluster.workloads import PROFILE, even

loads = st.integers(0, 400)
seconds = st.sampled_from([0.05, 0.5, 5.0])


@jit
def how_many(here: int, there: int, request_s: float, migration_s: float) -> int:
    return to_move(here, there, request_s, migration_s)


@jit
def take_out(state: State, adapter: int, first_request: int) -> int:
    return withdraw(state, adapter, first_request)


@given(loads, loads, seconds, st.sampled_from([0.0, 0.05, 1.0]))
def test_the_number_moved_minimises_the_longer_processing_time(
    here: int, there: int, request_s: float, migration_s: float
) -> None:
    assume(here >= there)

    def longer(n: int) -> float:
        return max((here - n) * request_s, (there + n) * request_s + n * migration_s)

    best = min(longer(n) for n in range(here + 1))
    assert math.isclose(longer(how_many(here, there, request_s, migration_s)), best, rel_tol=1e-12)


@given(worlds(), st.integers(0, 30), st.integers(0, 10))
def test_a_withdrawal_removes_the_given_waiting_requests_and_keeps_the_state_valid(
    world: World, at: int, first_request: int
) -> None:
    for step, (state, _) in enumerate(play(world)):
        if step == at:
            _withdraw_everywhere(state, world.limits, world.num_blocks, first_request)
            break


def _withdraw_everywhere(state: State, limits: Limits, num_blocks: int, first_request: int) -> None:
    before = waiting_rows(state)
    movable = [r for r in before if state.rows.output[r] == 0 and state.rows.request[r] >= first_request]
    left = [r for r in before if r not in movable]
    taken = sum(take_out(state, adapter, first_request) for adapter in range(state.adapters.size))
    assert taken == len(movable)
    assert waiting_rows(state) == left
    state.counters.n_gone = 0  # a step in flight is none of the withdrawal's business
    if limits.policy != s.SLORA:  # which frees the pages of adapters with the next request that ends
        check_integrity(state, limits, num_blocks)


@given(clusters())
def test_every_request_is_at_one_instance_after_any_number_of_moves(scenario: ClusterScenario) -> None:
    rule = build_rule(Dlora(period_s=0.005, excess=0.5, request_s=0.01, migration_s=0.003), scenario)
    laid = lay_out(scenario, by_rank=True, first_rows=1)
    run_laid(laid, rule, 0)
    somewhere = [np.flatnonzero(laid.members[0].trace.finish_ns != t.NEVER)]
    somewhere += [np.flatnonzero(laid.members[0].trace.status == t.STATUS_REJECTED)]
    for i, member in enumerate(laid.members):
        state, request = member.state, member.state.rows.request
        check_integrity(state, member.limits, scenario.engines[i].num_blocks)
        running = [row for row in running_rows(state) if state.rows.since[row] != s.ENDING]
        here = [int(request[row]) for row in (*running, *waiting_rows(state))]
        somewhere.append(np.array(here + unseen_requests(laid, i), np.int64))
        assert np.all(laid.cluster.instance[somewhere[-1]] == i)
        waiting = len(waiting_rows(state)) + len(unseen_requests(laid, i))
        assert member.clock.rank_stats[PRESENT].sum() == len(running) + waiting
        assert member.clock.rank_stats[QUEUED].sum() == waiting
    np.testing.assert_array_equal(np.sort(np.concatenate(somewhere)), np.arange(laid.cluster.instance.size))


def test_requests_leave_a_busy_instance_for_an_idle_one() -> None:
    """Ten adapters have two holders, of which the shares of the plan use only one."""
    workload = even(10, 12.0)
    names = [adapter.name for adapter in workload.adapters]
    engine = {"profile": PROFILE, "a_max": 8, "s_max": 8, "max_num_seqs": 8}
    instances = [
        Instance(**engine, adapters=dict.fromkeys(names, 1.0)),
        Instance(**engine, adapters=dict.fromkeys(names[:5], 1.0)),
    ]
    never = Dlora(period_s=1e6)
    still = simulate_cluster(workload, instances, router=never, duration_s=120.0)
    moved = simulate_cluster(workload, instances, router=Dlora(), duration_s=120.0)
    assert still.migrations == 0
    assert moved.migrations > 0
    assert moved.submitted == still.submitted
    assert sum(moved.requests_per_instance) == moved.submitted
