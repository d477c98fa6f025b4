"""Fluid model: bounds and monotonicity for any engine and load, and agreement with the twin."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from capplan.models import ADDITIVE
from capplan.models._fluid import FluidEngine, FluidLoad, FluidState, batch_limit, fluid_state, gamma_gaps
from capplan.models._step_latency import DIGITAL_TWIN
from capplan.models.surrogates import feature_of
from capplan.models.surrogates._features import expected_tok_s
from capplan.spec import EngineLimits
from tests.models.surrogates.runs import CASES, run

HORIZON_S = 3600.0
MANY = 1e9


def state_of(engine: FluidEngine, load: FluidLoad) -> FluidState:
    return fluid_state(engine, load, HORIZON_S, np.empty(load.rates_rps.size))


def additive(**ms: float) -> np.ndarray:
    return np.array([ms.get(name, 0.0) for name in ADDITIVE.coefficients])


PLAIN = additive(base_ms=10.0, ms_per_ktoken=30.0, ms_per_kv_ktoken=0.05)
DEAR_ADAPTERS = additive(
    base_ms=8.0, ms_per_ktoken=20.0, ms_per_slot=0.01, ms_per_adapter=0.1, ms_per_adapter_krequest=0.5
)
PAPER = np.array([0.01, 0.001, 0.002, 0.1, 1.0, 0.05, 10.0])
ENGINES = ((ADDITIVE.code, PLAIN), (ADDITIVE.code, DEAR_ADAPTERS), (DIGITAL_TWIN.code, PAPER))


@st.composite
def engines(draw: st.DrawFn) -> FluidEngine:
    form, k = draw(st.sampled_from(ENGINES))
    return FluidEngine(
        step_form=form,
        step_coefficients=k,
        limits=EngineLimits(
            max_loras=float(draw(st.integers(1, 400))),
            max_lora_rank=float(draw(st.sampled_from([8, 64, 512]))),
            max_num_seqs=float(draw(st.integers(1, 4096))),
            max_num_batched_tokens=draw(st.floats(1.0, 65_536.0)),
        ),
        kv_requests=draw(st.floats(0.0, 1e5)),
        adapter_load_s=draw(st.floats(0.0, 2.0)),
        max_in_flight=25_000.0,
    )


def changed(engine: FluidEngine, **limits: float) -> FluidEngine:
    """Return the engine with other limits."""
    return engine._replace(limits=engine.limits._replace(**limits))


def load_of(
    rates: dict[float, float],
    prompt: float = 250.0,
    output: float = 150.0,
    output_cv: float = 0.7,
    arrivals_cv: float = 1.0,
) -> FluidLoad:
    asked = np.array(sorted(rate for rate in rates if rate > 0.0))
    counts = np.array([rates[rate] for rate in asked])
    return FluidLoad(
        rates_rps=asked,
        gaps_s=1.0 / asked,
        counts=counts,
        adapters=sum(rates.values()),
        total_rps=float((counts * asked).sum()),
        prompt_tokens=prompt,
        output_tokens=output,
        kv_tokens_per_request=prompt + output / 2,
        prefill_mpairs_per_request=prompt * (prompt + 1.0) / 2e6,
        output_cv=output_cv,
        mean_rank=16.0,
        max_rank=32.0,
        arrivals_cv=arrivals_cv,
    )


ASKED = st.floats(-6.0, 2.0).map(lambda exponent: 10.0**exponent)
RATES = st.one_of(st.just(0.0), ASKED)


@st.composite
def loads(draw: st.DrawFn, rates: st.SearchStrategy[float] = RATES) -> FluidLoad:
    counts = draw(st.dictionaries(rates, st.integers(1, 200).map(float), min_size=1, max_size=5))
    lengths = draw(st.floats(1, 2e4)), draw(st.floats(1, 2e4))
    return load_of(counts, *lengths, draw(st.floats(0, 3)), draw(st.floats(0, 10)))


def scaled(load: FluidLoad, factor: float) -> FluidLoad:
    """Return the load with every rate multiplied."""
    return load._replace(
        rates_rps=load.rates_rps * factor, gaps_s=load.gaps_s / factor, total_rps=load.total_rps * factor
    )


def multiplied(load: FluidLoad, factor: float) -> FluidLoad:
    """Return the load with so many times as many adapters of every rate."""
    return load._replace(
        counts=load.counts * factor, adapters=load.adapters * factor, total_rps=load.total_rps * factor
    )


@pytest.mark.long
@given(engines(), loads())
def test_every_figure_is_finite_and_every_share_a_share(engine: FluidEngine, load: FluidLoad) -> None:
    state = state_of(engine, load)
    assert all(np.isfinite(value) and value >= 0.0 for value in state)
    assert state.served_rps <= state.capacity_rps * (1 + 1e-9)
    assert 0.0 < state.slots_share <= 1.0 + 1e-9
    assert 0.0 <= state.loading_share < 1.0 + 1e-9
    assert state.batch_over_limit <= 1.0 + 1e-9
    assert 0.0 <= state.full_adapters <= engine.limits.max_loras
    assert state.step_s > 0.0
    assert state.capacity_rps > 0.0


@given(engines(), st.floats(0.001, 100.0))
def test_a_lone_adapter_never_waits_for_a_slot(engine: FluidEngine, rate: float) -> None:
    state = state_of(engine, load_of({rate: 1.0}))
    assert state.slot_wait_s == pytest.approx(0.0, abs=1e-9)
    assert state.slots_share == 1.0


@given(engines(), loads())
def test_where_every_adapter_has_a_slot_none_waits_and_nothing_is_loaded(
    engine: FluidEngine, load: FluidLoad
) -> None:
    state = state_of(changed(engine, max_loras=load.adapters), load)
    assert state.slot_wait_s == pytest.approx(0.0, abs=1e-9)
    assert state.slots_share == 1.0
    assert state.loading_share == 0.0


@given(engines(), st.integers(1, 300))
def test_without_requests_nothing_waits_and_nothing_is_served(engine: FluidEngine, idle: int) -> None:
    state = state_of(engine, load_of({0.0: float(idle)}))
    assert state.slot_wait_s == pytest.approx(0.0, abs=1e-9)
    assert state.slots_share == 1.0
    assert state.served_rps == pytest.approx(0.0, abs=1e-9)


@given(engines(), loads(ASKED))
def test_idle_adapters_take_no_load_away(engine: FluidEngine, load: FluidLoad) -> None:
    """With a slot for each adapter, idle ones change nothing under a model without a cost per slot."""
    engine = changed(engine, max_loras=1e4)._replace(step_form=ADDITIVE.code, step_coefficients=PLAIN)
    more = load._replace(adapters=load.adapters + 9.0)
    assert state_of(engine, more) == pytest.approx(state_of(engine, load), rel=1e-9, abs=1e-12)


@given(engines(), loads(), st.floats(1.01, 50.0))
def test_seats_and_memory_raise_the_capacity_where_nothing_else_binds(
    engine: FluidEngine, load: FluidLoad, factor: float
) -> None:
    free = changed(engine, max_loras=load.adapters, max_num_batched_tokens=MANY)
    free = free._replace(step_form=ADDITIVE.code, step_coefficients=PLAIN)
    places = engine.limits.max_num_seqs
    few_seats, many_seats = (
        changed(free._replace(kv_requests=MANY), max_num_seqs=seats) for seats in (places, factor * places)
    )
    less, more = (
        changed(free._replace(kv_requests=held), max_num_seqs=MANY) for held in (places, factor * places)
    )
    for few, many in ((few_seats, many_seats), (less, more)):
        assert batch_limit(many, load) > batch_limit(few, load)
        assert state_of(many, load).capacity_rps > state_of(few, load).capacity_rps


@given(engines(), loads(), st.floats(1.0, 50.0))
def test_what_does_not_bind_changes_no_capacity(engine: FluidEngine, load: FluidLoad, factor: float) -> None:
    engine = changed(engine, max_num_seqs=8.0, max_loras=load.adapters)._replace(kv_requests=20.0)
    more = engine._replace(kv_requests=20.0 * factor)
    assert state_of(more, load).capacity_rps == state_of(engine, load).capacity_rps


@given(engines(), loads(), st.floats(1.05, 20.0))
def test_longer_outputs_lower_the_capacity(engine: FluidEngine, load: FluidLoad, factor: float) -> None:
    tokens = max(engine.limits.max_num_batched_tokens, load.prompt_tokens + load.output_tokens)
    engine = changed(engine, max_loras=load.adapters, max_num_batched_tokens=tokens)
    engine = engine._replace(step_form=ADDITIVE.code, step_coefficients=PLAIN)
    longer = load._replace(
        output_tokens=load.output_tokens * factor, kv_tokens_per_request=load.kv_tokens_per_request * factor
    )
    shorter = state_of(engine, load).capacity_rps
    assert state_of(engine, longer).capacity_rps < shorter * (1 + 1e-9)


@given(engines(), loads(ASKED), st.floats(1.0, 30.0))
def test_more_load_never_raises_the_share_that_is_expected_to_be_served(
    engine: FluidEngine, load: FluidLoad, factor: float
) -> None:
    shares = [
        min(1.0, state_of(engine, asked).served_rps / asked.total_rps)
        for asked in (load, scaled(load, factor))
    ]
    assert shares[1] <= shares[0] + 0.02


@given(engines(), loads())
def test_adapters_of_one_rate_count_alike_together_and_apart(engine: FluidEngine, load: FluidLoad) -> None:
    apart = load._replace(
        rates_rps=np.repeat(load.rates_rps, 2),
        gaps_s=np.repeat(load.gaps_s, 2),
        counts=np.column_stack([0.25 * load.counts, 0.75 * load.counts]).ravel(),
    )
    together, split = state_of(engine, load), state_of(engine, apart)
    assert split == pytest.approx(together, rel=1e-3, abs=1e-9)


@given(engines(), loads(ASKED), st.floats(1.0, 4.0))
def test_more_adapters_are_never_served_a_larger_share(
    engine: FluidEngine, load: FluidLoad, factor: float
) -> None:
    more = multiplied(load, 1.0 + factor)
    shares = [min(1.0, state_of(engine, asked).served_rps / asked.total_rps) for asked in (load, more)]
    assert shares[1] <= shares[0] + 0.02


@given(st.floats(0.1, 10.0), st.floats(0.0, 50.0))
def test_gaps_are_gamma_distributed(cv: float, length: float) -> None:
    gaps = stats.gamma(1 / cv**2, scale=cv**2)
    longer, shorter = gamma_gaps(cv, length)
    assert longer == pytest.approx(gaps.sf(length), abs=1e-4)
    # The mean of the shorter ones is that of a gamma distribution of a shape larger by one.
    assert shorter == pytest.approx(stats.gamma(1 / cv**2 + 1, scale=cv**2).cdf(length), abs=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_the_twin_serves_what_the_estimate_expects_within_a_tenth(case: str) -> None:
    features, result = run(case).features, run(case).result
    expected = expected_tok_s(features) / feature_of(features, "offered_tok_s")
    assert expected == pytest.approx(run(case).share_of_declared, rel=0.1)
    assert feature_of(features, "step_ms") == pytest.approx(run(case).step_ms, rel=0.25)
    # Well below capacity as the estimate has it, the twin keeps up; well above, it starves.
    load = feature_of(features, "load_over_capacity")
    assert load > 0.8 or not result.starved
    assert load < 1.2 or result.starved
