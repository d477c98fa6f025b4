"""Engine knobs: values to choose from, their tuning, and their use in a plan."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan import (
    Adapter,
    Assignment,
    EngineConfig,
    InfeasibleError,
    InputError,
    Lengths,
    Profile,
    Workload,
)
from capplan.planner import SolverContext, plan
from capplan.planner.explain import CurveRuns
from capplan.planner.explain._curve import knob_curves
from capplan.planner.problem import Estimate, Problem, split_hot_adapters
from capplan.planner.problem._estimate import TwinEstimator
from capplan.planner.problem._problem import KnobSearch
from capplan.planner.problem._settings import (
    KNOBS,
    RUNNING_REQUESTS,
    TOKEN_BUDGETS,
    has_open_knobs,
    knob_grid,
    tune_knobs,
)
from capplan.planner.problem._setup import make_problem
from capplan.planner.solvers import registry
from capplan.spec import DEFAULT_MAX_NUM_BATCHED_TOKENS, DEFAULT_MAX_NUM_SEQS, Slo, zipf
from capplan.testing import example_problem

pytestmark = pytest.mark.long

BOUNDED = Slo(tpot_p99_ms=50.0)


def bounded(engine: EngineConfig | None = None, knobs: KnobSearch = KnobSearch.FITTED) -> Problem:
    """Return a problem of four adapters with a latency bound."""
    problem = example_problem(0, adapters=4, gpus=2, engine=engine)
    workload = problem.workload.replace(slo=BOUNDED)
    return replace(problem, workload=workload, knobs=knobs)


def test_values_are_open_with_a_latency_bound_only() -> None:
    unbounded = example_problem(0, adapters=4, gpus=2)
    for problem in (unbounded, bounded(knobs=KnobSearch.DEFAULT)):
        grid = knob_grid(problem, 0)
        assert grid["max_num_batched_tokens"] == (DEFAULT_MAX_NUM_BATCHED_TOKENS,)
        assert grid["max_num_seqs"] == (DEFAULT_MAX_NUM_SEQS,)
        assert not has_open_knobs(problem, 0)
    assert has_open_knobs(bounded(), 0)


@given(seqs=st.sampled_from([None, 8, 300]), tokens=st.sampled_from([None, 700, 4096]))
def test_a_given_value_stays(seqs: int | None, tokens: int | None) -> None:
    engine = EngineConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens)
    for knobs in KnobSearch:
        grid = knob_grid(bounded(engine, knobs), 0)
        assert seqs is None or grid["max_num_seqs"] == (seqs,)
        assert tokens is None or grid["max_num_batched_tokens"] == (tokens,)


def test_values_are_inside_the_fitted_range_unless_any_is_asked_for(profile: Profile) -> None:
    fitted, every = knob_grid(bounded(), 0), knob_grid(bounded(knobs=KnobSearch.ANY), 0)
    assert every["max_num_batched_tokens"] == TOKEN_BUDGETS
    assert every["max_num_seqs"] == RUNNING_REQUESTS
    ranges = profile.step_latency.fitted_range
    assert max(fitted["max_num_batched_tokens"]) <= 1.05 * ranges["tokens"][1]
    assert max(fitted["max_num_seqs"]) <= 1.05 * ranges["requests"][1]
    assert set(fitted["max_num_batched_tokens"]) < set(every["max_num_batched_tokens"])


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(InputError, match="default, fitted, any"):
        KnobSearch.named("all")


@given(
    best_tokens=st.sampled_from(TOKEN_BUDGETS),
    best_seqs=st.sampled_from(RUNNING_REQUESTS),
    limit=st.floats(0.0, 8.0),
    until_it_holds=st.booleans(),
)
def test_tuning_ends_at_the_least_utilization_or_where_the_instance_holds(
    best_tokens: int, best_seqs: int, limit: float, until_it_holds: bool
) -> None:
    """The utilization is the distance to the best values, in steps of the grids."""
    problem = bounded(knobs=KnobSearch.ANY)
    asked: list[tuple[int, int]] = []

    def away(tokens: int, seqs: int) -> int:
        steps = abs(TOKEN_BUDGETS.index(tokens) - TOKEN_BUDGETS.index(best_tokens))
        return steps + abs(RUNNING_REQUESTS.index(seqs) - RUNNING_REQUESTS.index(best_seqs))

    def estimator(assignment: Assignment) -> Estimate:
        args = problem.engine_args(assignment)
        asked.append((args.max_num_batched_tokens, args.max_num_seqs))
        return Estimate(1.0, starved=away(*asked[-1]) > limit, utilization=float(away(*asked[-1])))

    start = Assignment(problem.shares, 4)
    assignment, estimate = tune_knobs(problem, start, estimator, until_it_holds=until_it_holds)
    args = problem.engine_args(assignment)
    assert args.max_num_seqs <= args.max_num_batched_tokens
    assert estimate == estimator(assignment)
    if until_it_holds:
        assert estimate.starved == all(away(*each) > limit for each in asked)
        assert away(*asked[0]) > limit or len(asked) == 2
    elif best_seqs <= best_tokens:
        assert (args.max_num_batched_tokens, args.max_num_seqs) == (best_tokens, best_seqs)
    assert len(asked) <= 2 * (len(TOKEN_BUDGETS) + len(RUNNING_REQUESTS))


@dataclass(frozen=True)
class CapacityByKnobs:
    """Sustains a request rate that depends on the knobs."""

    problem: Problem
    rps: float
    factors: Mapping[tuple[int, int], float]
    """Relative rate by token budget and running requests; 1 for others."""

    def __call__(self, assignment: Assignment) -> Estimate:
        args = self.problem.engine_args(assignment)
        factor = self.factors.get((args.max_num_batched_tokens, args.max_num_seqs), 1.0)
        load = sum(share.rate_rps for share in assignment.shares) / (self.rps * factor)
        return Estimate(1.0, load > 1.0, utilization=load)


def gpus_of(problem: Problem, estimator: CapacityByKnobs) -> int:
    return len(registry()["capplan"].place(problem, SolverContext(estimator=estimator, twin=estimator)))


@settings(max_examples=15, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    factors=st.dictionaries(
        st.tuples(st.sampled_from(TOKEN_BUDGETS), st.sampled_from(RUNNING_REQUESTS)),
        st.floats(0.3, 3.0),
        max_size=20,
    ),
)
def test_open_knobs_never_take_more_gpus(seed: int, factors: dict[tuple[int, int], float]) -> None:
    problem = example_problem(seed, adapters=20, gpus=16)
    problem = replace(problem, workload=problem.workload.replace(slo=BOUNDED))
    estimator = CapacityByKnobs(problem, 2.0, factors)
    try:
        default = gpus_of(replace(problem, knobs=KnobSearch.DEFAULT), estimator)
    except InfeasibleError:
        return
    assert gpus_of(problem, estimator) <= default
    if factors.get((1024, 256), 0.0) > 2.0:
        assert gpus_of(problem, estimator) < default


def test_default_knobs_are_the_defaults_only() -> None:
    """Other numbers of running requests are no fallback either."""
    problem = bounded(knobs=KnobSearch.DEFAULT)
    estimator = CapacityByKnobs(problem, 1e-3, {(2048, 512): 1e6})
    with pytest.raises(InfeasibleError):
        gpus_of(problem, estimator)
    assert gpus_of(bounded(), estimator) == 1


def test_adapters_that_hold_with_other_knobs_only_are_not_refused() -> None:
    """A hot adapter is split into the fewest shares that hold with any knobs, if none do with the default."""
    problem = bounded()
    hottest = max(share.rate_rps for share in problem.shares)
    estimator = CapacityByKnobs(problem, 1e-3, {(512, 256): 0.6e3 * hottest})
    shares = split_hot_adapters(problem, estimator)
    assert max(share.rate_rps for share in shares) == pytest.approx(hottest / 2.0)
    with pytest.raises(InfeasibleError, match="even when spread"):
        split_hot_adapters(replace(problem, knobs=KnobSearch.DEFAULT), estimator)


def test_the_twin_tells_settings_apart() -> None:
    """A smaller token budget shortens the steps that carry prefills."""
    problem = example_problem(3, adapters=30, gpus=1)
    twin = TwinEstimator(replace(problem, simulated_s=120.0), 0)
    instance = Assignment(problem.shares, 16)
    small = replace(instance, knobs=EngineConfig(max_num_batched_tokens=256))
    assert twin(small).e2e_s_mean != twin(instance).e2e_s_mean
    assert problem.engine_args(small).max_num_batched_tokens == 256
    assert problem.engine_args(instance).max_num_batched_tokens == DEFAULT_MAX_NUM_BATCHED_TOKENS


@pytest.fixture(scope="module")
def busy() -> Workload:
    """Sixty adapters with large slots, whose prefills lengthen TPOT beyond its bound on one GPU."""
    shares = zipf(60, 0.5)
    return Workload(
        base_model="meta-llama/Llama-3.1-8B-Instruct",
        profile="h100-64g/llama-3.1-8b/vllm-0.8.5",
        adapters=tuple(Adapter(name=f"a{i}", rank=64, rate_rps=8.0 * each) for i, each in enumerate(shares)),
        prompt_tokens=Lengths(mean=223, std=245),
        output_tokens=Lengths(mean=194, std=206),
        slo=Slo(ttft_p99_s=2.0, tpot_p99_ms=65.0),
    )


def test_open_knobs_save_a_gpu(busy: Workload) -> None:
    default, tuned = plan(busy, gpus=4, knobs="default"), plan(busy, gpus=4)
    assert default.verification.ok
    assert tuned.verification.ok
    assert tuned.totals.gpus < default.totals.gpus
    assert min(group.engine_args.max_num_batched_tokens for group in tuned.groups) < 2048
    for group in default.groups:
        assert group.engine_args.max_num_batched_tokens == DEFAULT_MAX_NUM_BATCHED_TOKENS


def test_given_values_stay_in_the_plan(busy: Workload) -> None:
    fixed = busy.replace(engine=EngineConfig(max_num_batched_tokens=2048, max_num_seqs=256))
    default, planned = plan(busy, gpus=4, knobs="default"), plan(fixed, gpus=4, knobs="any")
    assert planned.totals.gpus == default.totals.gpus
    for group in planned.groups:
        assert group.engine_args.max_num_batched_tokens == 2048
        assert group.engine_args.max_num_seqs == 256


def test_curves_show_every_open_value_and_the_chosen_one(busy: Workload) -> None:
    problem = make_problem(busy, 1, None)
    chosen = Assignment(problem.shares, 60, knobs=EngineConfig(max_num_batched_tokens=256))
    curves = knob_curves(CurveRuns(replace(problem, simulated_s=300.0), chosen))
    assert [curve.setting for curve in curves] == list(KNOBS)
    for curve in curves:
        values = [point.value for point in curve.points]
        assert values == sorted(values)
        assert set(values) <= set(knob_grid(problem, 0)[curve.setting])
        assert curve.chosen in values
    tokens = curves[0].points
    first, last = tokens[0].tpot_p99_ms, tokens[-1].tpot_p99_ms
    assert first is not None
    assert last is not None
    assert first < last  # shorter steps
    closed = replace(problem, knobs=KnobSearch.DEFAULT)
    assert knob_curves(CurveRuns(closed, Assignment(problem.shares, 60))) == ()
