from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.step_tables import tabulated
from capplan import Adapter, Lengths, Problem, Profile, Workload, load_profile, simulate
from capplan.planner.problem import GpuPool
from capplan.planner.problem._bound import busy_gpus, lower_bound_gpus
from capplan.spec import StepTable
from tests.planner.conftest import MODEL, PROFILE


def problem_of(workload: Workload, profile: Profile) -> Problem:
    return Problem(workload, (GpuPool(None, profile, 8),), workload.engine.complete(), ())


lengths = st.builds(
    lambda prompt, output, spread: (
        Lengths(mean=prompt, std=spread * prompt),
        Lengths(mean=output, std=spread * output),
    ),
    st.floats(20, 1500),
    st.floats(5, 400),
    st.floats(0, 1.2),
)


@settings(max_examples=12)
@given(
    kinds=st.lists(lengths, min_size=1, max_size=3),
    busy=st.floats(0.5, 1.6),
    seed=st.integers(0, 99),
    tables=st.booleans(),
)
def test_load_that_one_simulated_gpu_serves_has_a_bound_of_one(
    kinds: list[tuple[Lengths, Lengths]], busy: float, seed: int, tables: bool
) -> None:
    profile = with_concave_tables(load_profile(PROFILE)) if tables else load_profile(PROFILE)
    workload = Workload(
        base_model=MODEL,
        adapters=tuple(
            Adapter(name=f"a{i}", rank=8, rate_rps=1.0, prompt_tokens=prompt, output_tokens=output)
            for i, (prompt, output) in enumerate(kinds)
        ),
        prompt_tokens=Lengths(mean=1),
        output_tokens=Lengths(mean=1),
        headroom=0.0,
    )
    scale = busy / busy_gpus(problem_of(workload, profile))
    loaded = workload.replace(adapters=tuple(a.replace(rate_rps=scale) for a in workload.adapters))
    result = simulate(loaded, profile, a_max=len(kinds), s_max=8, duration_s=600.0, seed=seed)
    if not result.starved:
        drawn = result.offered_tok_s / (scale * sum(p.mean_tokens + o.mean_tokens for p, o in kinds))
        assert busy_gpus(problem_of(loaded, profile)) * drawn <= 1.01


def with_concave_tables(profile: Profile) -> Profile:
    """Return the profile with tables of which no point but the ends is on a line below them."""
    tables = {
        "tokens_ms": StepTable.of({"tokens": [1, 64, 512, 4096]}, [9.0, 11.0, 28.0, 150.0]),
        "requests_ms": StepTable.of(
            {"requests": [1, 256], "kv_tokens": [0, 50_000, 400_000]}, [[0.1, 6.0, 30.0], [0.5, 6.5, 30.0]]
        ),
    }
    terms = tabulated(profile).step_latency
    return profile.replace(step_latency=terms.replace(tables=tables))


def test_the_bound_of_an_additive_profile_is_that_of_its_tables(
    workload: Callable[..., Workload], profile: Profile
) -> None:
    served = workload(("a", 8, 2.0), ("b", 16, 5.0))
    plain, tables = (busy_gpus(problem_of(served, each)) for each in (profile, tabulated(profile)))
    assert tables == pytest.approx(plain, rel=1e-3)


def test_busy_gpus_are_proportional_to_rates_over_headroom(
    workload: Callable[..., Workload], profile: Profile
) -> None:
    base = problem_of(workload(("a", 8, 2.0), ("b", 16, 5.0), headroom=0.0), profile)
    double = problem_of(workload(("a", 8, 4.0), ("b", 16, 10.0), headroom=0.0), profile)
    half = replace(base, workload=base.workload.replace(headroom=0.5))
    assert busy_gpus(double) == pytest.approx(2 * busy_gpus(base), rel=1e-9)
    assert busy_gpus(half) == pytest.approx(2 * busy_gpus(base), rel=1e-9)


def test_the_bound_is_monotone_in_rates(workload: Callable[..., Workload], profile: Profile) -> None:
    bounds = [
        lower_bound_gpus(problem_of(workload(("a", 8, 3.0), ("b", 16, rate)), profile))
        for rate in (0.0, 1.0, 5.0, 20.0, 80.0)
    ]
    assert bounds == sorted(bounds)
    assert bounds[-1] > bounds[0]


def test_the_bound_without_load_or_step_model(workload: Callable[..., Workload], profile: Profile) -> None:
    assert lower_bound_gpus(problem_of(workload(("idle", 8, 0.0)), profile)) == 1
    step = profile.step_latency
    odd = {name: c.replace(value=-c.value) for name, c in step.coefficients.items()}
    strange = profile.replace(step_latency=step.replace(coefficients=odd))
    assert lower_bound_gpus(problem_of(workload(("a", 8, 90.0)), strange)) == 1


def test_outputs_limited_by_max_model_len_cost_less(
    workload: Callable[..., Workload], profile: Profile
) -> None:
    one = (("a", 8, 20.0),)
    long = workload(*one, output_tokens=Lengths(mean=2000), prompt_tokens=Lengths(mean=100))
    short = long.replace(engine=long.engine.replace(max_model_len=2048))
    shorter = long.replace(engine=long.engine.replace(max_model_len=2000))
    values = [busy_gpus(problem_of(w, profile)) for w in (shorter, short, long)]
    assert values == sorted(values)
    assert values[0] < values[2]


def test_load_that_only_a_larger_batch_serves_has_a_bound_of_one(profile: Profile) -> None:
    """Without a latency bound the search falls back to 512 running requests: the bound allows for them."""
    workload = Workload(
        base_model=MODEL,
        adapters=(Adapter(name="a", rank=8, rate_rps=1.0),),
        prompt_tokens=Lengths(mean=20),
        output_tokens=Lengths(mean=400),
        headroom=0.0,
    )
    step = profile.step_latency
    slow = {**step.coefficients, "base_ms": step.coefficients["base_ms"].replace(value=60.0)}
    large = profile.replace(step_latency=step.replace(coefficients=slow))
    rate_rps = 0.95 / busy_gpus(problem_of(workload, large))
    loaded = workload.replace(adapters=(workload.adapters[0].replace(rate_rps=rate_rps),))
    served = [
        simulate(loaded, large, a_max=1, s_max=8, max_num_seqs=seqs, duration_s=600.0).served_fraction
        for seqs in (256, 512)
    ]
    assert served[0] < 0.9 < served[1]
    assert busy_gpus(problem_of(loaded, large)) < 1.0
