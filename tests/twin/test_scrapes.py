"""Effect of metrics scrapes on the gaps between tokens at the client."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import EngineConfig, Profile, SimulationResult, Workload, simulate
from capplan.spec import Coefficient
from capplan.twin import Scenario, build_scenario
from capplan.twin.instance import NS_PER_S, run
from capplan.twin.instance import _metrics as scrapes
from tests.twin.examples import part, profile, workload

SETTINGS: dict[str, Any] = {"a_max": 8, "s_max": 8, "duration_s": 600.0, "max_model_len": 512}
ITL = ("itl_ms_mean", "itl_ms_p50", "itl_ms_p90", "itl_ms_p95", "itl_ms_p99")
SCRAPED = {"scrape_us_per_series": 1000.0, "scrape_us_per_series_adapter": 10.0, "scrape_share": 1.0}


def with_host(**values: float) -> Profile:
    return profile().replace(host=part("per-request", request_ms=0.0, client_itl_factor=1.0, **values))


def many() -> Workload:
    """Eight adapters that each run half of the time: any of 256 sets may run."""
    return workload(adapters=8, rate_rps=4.0)


def answer(asked: Profile) -> SimulationResult:
    return dataclasses.replace(simulate(many(), asked, **SETTINGS), wall_s=0.0)


def test_without_scrapes_clients_see_the_engines_gaps() -> None:
    bare = answer(with_host())
    assert answer(with_host(scrape_interval_s=0.0, **SCRAPED)) == bare
    assert answer(with_host(scrape_interval_s=2.0, **(SCRAPED | {"scrape_share": 0.0}))) == bare


def test_scrapes_lengthen_all_gaps_alike_and_change_nothing_else() -> None:
    bare, scraped = answer(with_host()), answer(with_host(scrape_interval_s=2.0, **SCRAPED))
    factor = scraped.itl_ms_mean / bare.itl_ms_mean
    assert factor > 1.01
    expected = dataclasses.asdict(bare)
    for name in ITL:
        expected[name] *= factor
    assert dataclasses.asdict(scraped) == pytest.approx(expected)


def test_the_constant_factor_multiplies_the_effect_of_scrapes() -> None:
    host = with_host(scrape_interval_s=2.0, **SCRAPED).host
    doubled = host.replace(coefficients=host.coefficients | {"client_itl_factor": Coefficient(value=2.0)})
    ours, twice = (answer(profile().replace(host=each)) for each in (host, doubled))
    assert twice.itl_ms_mean == pytest.approx(2 * ours.itl_ms_mean)


@given(
    steps=st.integers(10, 400), held=st.integers(2, 400), step_s=st.floats(0.005, 0.1), small=st.floats(0, 1)
)
def test_tokens_of_a_scrape_arrive_together(steps: int, held: int, step_s: float, small: float) -> None:
    """Count the gaps of one period: one per step of the pause, and one for the whole scrape."""
    gaps = [step_s] * steps + [held * step_s]
    factor = scrapes.stretch(steps * step_s, held * step_s, step_s, 1.0)
    assert factor * step_s == pytest.approx(np.mean(gaps))
    some = scrapes.stretch(steps * step_s, held * step_s, step_s, small)
    assert some - 1 == pytest.approx(small * (factor - 1))


def test_a_scrape_shorter_than_a_step_has_no_effect() -> None:
    assert scrapes.stretch(2.0, 0.009, 0.01, 1.0) == 1.0
    assert scrapes.stretch(2.0, 0.0, 0.01, 1.0) == 1.0


def scenario_of(asked: Workload) -> Scenario:
    args = EngineConfig(max_loras=8, max_lora_rank=8, max_model_len=512).complete()
    return build_scenario(asked, profile(), args, duration_s=600.0, seed=0)


@given(adapters=st.integers(1, 6), rate=st.floats(0.1, 20.0), served_s=st.floats(1.0, 1e5))
def test_a_server_shows_at_most_all_combinations(adapters: int, rate: float, served_s: float) -> None:
    scenario = scenario_of(workload(adapters=adapters, rate_rps=rate))
    met = scrapes.mean_series(scenario, 0.01, 8.0, served_s)
    assert 0.0 <= met <= 4.0**adapters  # each runs or not, and waits or not
    assert met <= scrapes.mean_series(scenario, 0.01, 8.0, 2 * served_s) <= 2 * met + 1e-9


def test_changing_adapters_make_more_combinations_than_constant_ones() -> None:
    busy = scenario_of(workload(adapters=8, rate_rps=60.0))
    at_times = scenario_of(workload(adapters=8, rate_rps=4.0))
    assert scrapes.mean_series(at_times, 0.01, 8.0, 3600.0) > 3 * scrapes.mean_series(busy, 0.01, 8.0, 3600.0)


def test_the_scrape_load_of_equal_steps_holds_that_step() -> None:
    scenario = scenario_of(many())
    trace = run(scenario)
    assert scenario.horizon_ns == SETTINGS["duration_s"] * NS_PER_S
    load = scrapes.scrape_load(scenario, trace)
    assert load is not None
    assert load.step_s == pytest.approx(0.01)
    assert 0.0 < load.adapters <= 8.0
    assert load.small_share == 1.0  # never more than 128 at once
