from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from capplan import Assignment, Lengths, Problem, Profile, Slo, Workload
from capplan.planner.evaluate import evaluate
from capplan.planner.problem import make_problem, whole_adapters
from capplan.spec import Trace

Make = Callable[..., Workload]


def posed(wishes: Workload, profile: Profile) -> Problem:
    problem = make_problem(wishes, 1, profile)
    return replace(problem, shares=whole_adapters(problem))


def test_a_trace_at_twice_the_speed_offers_twice_the_load(workload: Make, profile: Profile) -> None:
    """It ends in half the time, and so does the simulation: an idle second half would flatter the GPU."""
    arrivals = np.arange(0.0, 60.0, 0.5)
    count = arrivals.size
    trace = Trace.from_arrays(arrivals, ["a"] * count, np.full(count, 50), np.full(count, 5), 60.0)
    constant = {"prompt_tokens": Lengths(mean=50), "output_tokens": Lengths(mean=5)}
    problem = posed(workload(("a", 8, 2.0), trace=trace, **constant), profile)
    one, two = (
        evaluate(problem, Assignment(problem.shares, 1), 0, 3600.0, scale).result for scale in (1.0, 2.0)
    )
    assert (one.duration_s, two.duration_s) == (60.0, 30.0)
    assert two.offered_tok_s == pytest.approx(2 * one.offered_tok_s)


@pytest.mark.parametrize("bound", ["ttft_p99_s", "e2e_p95_s"])
def test_adapters_left_behind_break_a_percentile_although_completed_requests_keep_it(
    workload: Make, profile: Profile, bound: str
) -> None:
    """One hot adapter never leaves the only slot, and the others wait for ever."""
    cold = tuple((f"cold-{i}", 8, 0.02) for i in range(60))
    problem = posed(workload(("hot", 8, 12.0), *cold, slo=Slo(**{bound: 60.0})), profile)
    alone = evaluate(problem, Assignment(problem.shares, 1), 0, 3600.0)
    assert getattr(alone.result, bound.replace("_s", "").replace("_p", "_s_p")) < 60.0
    assert any(words.startswith(bound) and "still wait" in words for words in alone.violations)
    assert not evaluate(problem, Assignment(problem.shares, 32), 0, 3600.0).violations
