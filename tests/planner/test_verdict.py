"""Verdicts: stable queues, horizons that decide, windows of traces, and time limits."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from capplan import Adapter, Lengths, Profile, Workload, load_workload, plan, simulate
from capplan.errors import InfeasibleError, InputError
from capplan.planner.problem._bound import lower_bound_gpus
from capplan.planner.problem._setup import make_problem
from capplan.spec import Renewal, Slo, Trace, Unpredictable
from capplan.workload import deciding_time

pytestmark = pytest.mark.long

Maker = Callable[..., Workload]

MIXED = [(f"a{i}", 8 << i % 2, (1.5, 0.8, 0.4)[i % 3]) for i in range(60)]


@pytest.fixture
def overloaded(workload: Maker) -> Maker:
    """Return a maker of workloads that 1.5 GPUs serve, with 223 and 194 tokens per request on average."""

    def make(**fields: object) -> Workload:
        lengths = {"prompt_tokens": Lengths(mean=223, std=245), "output_tokens": Lengths(mean=194, std=206)}
        return workload(*MIXED, **{**lengths, "gpus": {"count": 8}, **fields})

    return make


def test_no_verified_plan_exceeds_its_own_capacity(overloaded: Maker, profile: Profile) -> None:
    made = plan(overloaded(), profile=profile, seeds=2)
    assert made.verification.verdict == "verified"
    assert all(group.predicted.load_over_capacity <= 0.9 for group in made.groups)
    assert all(group.predicted.ttft_s.p99 <= 30.0 for group in made.groups)


def test_the_criterion_of_the_papers_is_had_by_saying_so(overloaded: Maker, profile: Profile) -> None:
    stable = plan(overloaded(headroom=0.0), profile=profile, seeds=1)
    starving = plan(overloaded(headroom=0.0, slo=Slo(stable=False)), profile=profile, seeds=1)
    assert starving.totals.gpus <= stable.totals.gpus
    assert Slo(stable=False).latency_limits() == {}
    assert Slo().latency_limits() == {"ttft_p99_s": 30.0}
    assert Slo(ttft_mean_s=90.0).latency_limits() == {"ttft_p99_s": 90.0, "ttft_mean_s": 90.0}


def test_a_load_beyond_capacity_is_infeasible_though_nine_tenths_are_served(
    workload: Maker, profile: Profile
) -> None:
    busy = workload(("a", 8, 14.0), gpus={"count": 1}, headroom=0.0)
    while True:  # the largest load of which 90 % are served
        more = busy.at_load(1.05)
        if simulate(more, profile, a_max=1, s_max=8, seed=3).served_fraction < 0.92:
            break
        busy = more
    with pytest.raises(InfeasibleError):
        plan(busy, profile=profile, seeds=1)
    assert plan(busy.replace(slo=Slo(stable=False)), profile=profile, seeds=1).totals.gpus == 1


def test_slow_arrivals_take_long_to_decide(workload: Maker) -> None:
    steady = workload(("a", 8, 1.0))
    assert deciding_time(steady).duration_s == 20.0
    bursts = steady.replace(arrivals=Renewal(process="gamma", cv=50.0))
    assert deciding_time(bursts).duration_s == 20 * 2500.0
    changing = steady.replace(arrivals=Unpredictable(every_s=3600.0, factor=4.0))
    assert deciding_time(changing).duration_s == 8 * 3600.0
    slow_walk = steady.replace(arrivals=Unpredictable(every_s=60.0, factor=1.1))
    assert deciding_time(slow_walk).duration_s > 400 * 60.0


def test_simulations_last_as_long_as_arrivals_require(workload: Maker, profile: Profile) -> None:
    changing = workload(("a", 8, 0.5), arrivals=Unpredictable(every_s=3600.0, factor=4.0))
    made = plan(changing, profile=profile, seeds=2)
    assert made.verification.duration_s == 8 * 3600.0
    assert made.verification.verdict == "verified"
    short = plan(changing, profile=profile, seeds=2, duration_s=3600.0)
    assert short.verification.verdict == "undecided"
    assert short.verification.deciding_duration_s == 8 * 3600.0
    assert not short.verification.ok
    with pytest.raises(InputError, match="rates change every 3600 s"):
        short.require_verified()


def test_a_plan_without_requests_is_undecided(workload: Maker, profile: Profile) -> None:
    made = plan(workload(("a", 8, 1e-9)), profile=profile, seeds=1)
    assert made.verification.verdict == "undecided"
    assert "no request was simulated" in made.verification.reason
    assert made.verification.deciding_duration_s == pytest.approx(20e9)


@pytest.fixture
def trace() -> Trace:
    """Return 2.6 hours of 1, 4 and 1 requests per second."""
    rng = np.random.default_rng(5)
    counts, starts, lengths = (3600, 14_400, 2160), (0.0, 3600.0, 7200.0), (3600.0, 3600.0, 2160.0)
    parts = [start + length * rng.random(n) for n, start, length in zip(counts, starts, lengths, strict=True)]
    arrival_s = np.sort(np.concatenate(parts))
    names = [f"a{i}" for i in rng.integers(0, 3, arrival_s.size)]
    sizes = rng.integers(50, 500, arrival_s.size), rng.integers(50, 200, arrival_s.size)
    return Trace.from_arrays(arrival_s, names, *sizes, duration_s=9360.0)


@pytest.fixture
def traced(workload: Maker, trace: Trace) -> Workload:
    return workload(*((f"a{i}", 8, 0.7) for i in range(3)), trace=trace, slo=Slo(ttft_p99_s=5.0))


def test_bounds_hold_in_the_worst_window_of_a_trace(traced: Workload, trace: Trace, profile: Profile) -> None:
    made = plan(traced, profile=profile, seeds=3)
    check = made.verification
    assert (check.verdict, check.window_start_s, check.duration_s) == ("verified", 3600.0, 3600.0)
    assert len(check.seeds) == 3
    (group,) = made.groups
    assert group.predicted.low_tok_s < group.predicted.throughput_tok_s < group.predicted.high_tok_s
    busy = traced.replace(trace=trace.window(3600.0, 7200.0))
    alone = plan(busy, profile=profile, seeds=1)
    args = group.engine_args
    result = simulate(busy, profile, a_max=args.max_loras, s_max=args.max_lora_rank, duration_s=3600.0)
    assert alone.groups[0].predicted.ttft_s.p99 == result.ttft_s_p99
    assert group.predicted.ttft_s.p99 == pytest.approx(result.ttft_s_p99, rel=0.05)


def test_windows_partition_a_trace(traced: Workload, trace: Trace, profile: Profile) -> None:
    problem = make_problem(traced, 1, profile)
    parts = [part.workload.trace for _, part in problem.windows]
    assert [start_s for start_s, _ in problem.windows] == [0.0, 3600.0, 7200.0]
    assert sum(map(len, parts)) == len(trace)
    assert sum(part.duration_s for part in parts) == trace.duration_s
    joined = np.concatenate([part.prompt_tokens for part in parts])
    assert (joined == trace.prompt_tokens).all()


def test_a_bootstrap_sample_keeps_rate_and_mix(trace: Trace) -> None:
    sample, again, other = trace.resampled(1), trace.resampled(1), trace.resampled(2)
    assert sample == again != other
    assert len(sample) == len(trace)
    assert (np.diff(sample.arrival_ns) >= 0).all()
    assert sample.arrival_ns[0] >= 0
    assert sample.arrival_ns[-1] <= trace.duration_s * 1e9
    hourly = [np.histogram(each.arrival_ns / 1e9, np.arange(0, 9361, 60))[0] for each in (trace, sample)]
    assert (hourly[0] == hourly[1]).all()
    assert sample.prompt_tokens.mean() == pytest.approx(trace.prompt_tokens.mean(), rel=0.02)
    pairs = set(zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True))
    assert set(zip(sample.prompt_tokens.tolist(), sample.output_tokens.tolist(), strict=True)) <= pairs


def test_a_search_that_is_cut_says_so_and_takes_no_needless_gpus(overloaded: Maker, profile: Profile) -> None:
    wide = overloaded(gpus={"count": 64}, slo=Slo(ttft_p99_s=5.0))
    made = plan(wide, profile=profile, seeds=1, time_limit_s=20.0)
    assert made.provenance["search"] in ("complete", "time_limit")
    assert made.totals.gpus <= 2 * made.totals.lower_bound_gpus


def test_the_bound_counts_a_shared_prefix_once(profile: Profile) -> None:
    shared = Workload(
        base_model="meta-llama/Llama-3.1-8B-Instruct",
        profile="h100-80g/llama-3.1-8b/vllm-0.15.1",
        adapters=[Adapter(name="a", rank=8, rate_rps=16.7)],
        prompt_tokens=Lengths(mean=7100),
        output_tokens=Lengths(mean=60),
        shared_prefix_tokens=7088,
    )
    made = plan(shared, seeds=1)
    assert (made.totals.gpus, made.totals.lower_bound_gpus) == (1, 1)
    assert made.verification.verdict == "verified"
    assert lower_bound_gpus(make_problem(shared.replace(shared_prefix_tokens=0), None, None)) >= 3


def test_queues_are_planned_under_a_time_limit(cases_dir: Path) -> None:
    queued = load_workload(cases_dir / "23-queues-time-limit/w.yaml")
    made = plan(queued, seeds=1, time_limit_s=13.0)
    assert made.totals.gpus == 1
    assert made.verification.verdict in ("verified", "undecided")
    assert made.provenance["search"] in ("complete", "time_limit")
