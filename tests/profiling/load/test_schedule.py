import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest

from capplan.errors import InputError
from capplan.profiling.load.requests import scaled, schedule_of
from capplan.spec import Adapter, Lengths, Profile, Trace, Workload
from capplan.twin import simulate_detailed
from tests.cli.examples import profile_document


def workload(rate_rps: float = 2.0, adapters: int = 5) -> Workload:
    return Workload(
        base_model="meta-llama/Llama-3.1-8B-Instruct",
        adapters=[Adapter(name=f"a{i}", rank=8, rate_rps=rate_rps * (1 + i)) for i in range(adapters)],
        prompt_tokens=Lengths(mean=60, std=50),
        output_tokens=Lengths(mean=20, std=30),
    )


@pytest.mark.parametrize("correlation", [None, -0.6])
@pytest.mark.parametrize("rate_scale", [1.0, 0.4])
def test_the_schedule_is_what_the_twin_draws(correlation: float | None, rate_scale: float) -> None:
    profile = Profile.model_validate(profile_document() | {"length_correlation": correlation or 0.0})
    drawn = schedule_of(workload(), 30.0, 3, 256, rate_scale=rate_scale, profile=profile)
    twin = simulate_detailed(
        scaled(workload(), rate_scale), profile, a_max=4, s_max=8, duration_s=30.0, seed=3, max_model_len=256
    ).requests
    assert np.array_equal(drawn.due_s, twin.arrival_s)
    assert np.array_equal(drawn.adapter, twin.adapter)
    assert drawn.names == twin.adapters
    assert np.array_equal(drawn.prompt_tokens, twin.prompt_tokens)
    assert np.array_equal(drawn.output_tokens, twin.output_tokens)


@given(st.integers(0, 100))
def test_a_request_never_exceeds_the_longest_that_the_server_takes(seed: int) -> None:
    drawn = schedule_of(workload(), 10.0, seed, 100)
    assert (drawn.prompt_tokens + drawn.output_tokens <= 100).all()
    assert min(drawn.prompt_tokens.min(), drawn.output_tokens.min()) >= 1


def test_each_adapter_asks_as_a_poisson_process_of_its_own_rate() -> None:
    drawn = schedule_of(workload(), 1000.0)
    for number, adapter in enumerate(workload().adapters, start=1):
        gaps = np.diff(drawn.due_s[drawn.adapter == number])
        assert kstest(gaps, "expon", args=(0.0, 1.0 / adapter.rate_rps)).pvalue > 1e-3


def test_a_trace_is_replayed_faster_by_the_scale() -> None:
    trace = Trace.from_arrays([0.0, 1.0, 4.0], ["a0", "a1", "a0"], [5, 6, 7], [1, 2, 3], duration_s=5.0)
    drawn = schedule_of(workload().replace(trace=trace), 10.0, rate_scale=2.0)
    assert drawn.due_s.tolist() == [0.0, 0.5, 2.0]
    assert drawn.prompt_tokens.tolist() == [5, 6, 7]
    assert [drawn.names[number] for number in drawn.adapter] == ["a0", "a1", "a0"]


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_is_a_finite_number_above_zero(scale: float) -> None:
    with pytest.raises(InputError, match="rate_scale"):
        scaled(workload(), scale)
