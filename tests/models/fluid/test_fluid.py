"""The fluid estimate: bounds and directions that hold for any engine and load, and the twin's answers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from capplan.models.fluid import Gpu, Load, batch_limit, fluid
from capplan.models.fluid.slots import gamma_gaps
from capplan.models.step_latency import ADDITIVE, DIGITAL_TWIN
from capplan.models.surrogates.features import expected_tok_s, feature_of
from tests.models.surrogates.runs import CASES, run

HORIZON_S = 3600.0
MANY = 1e9


def additive(**ms: float) -> np.ndarray:
    return np.array([ms.get(name, 0.0) for name in ADDITIVE.coefficients])


PLAIN = additive(base_ms=10.0, ms_per_ktoken=30.0, ms_per_kv_ktoken=0.05)
DEAR_ADAPTERS = additive(
    base_ms=8.0, ms_per_ktoken=20.0, ms_per_slot=0.01, ms_per_adapter=0.1, ms_per_adapter_krequest=0.5
)
PAPER = np.array([0.01, 0.001, 0.002, 0.1, 1.0, 0.05, 10.0])
ENGINES = ((ADDITIVE.code, PLAIN), (ADDITIVE.code, DEAR_ADAPTERS), (DIGITAL_TWIN.code, PAPER))


@st.composite
def gpus(draw: st.DrawFn) -> Gpu:
    form, k = draw(st.sampled_from(ENGINES))
    return Gpu(
        form=form,
        k=k,
        a_max=float(draw(st.integers(1, 400))),
        s_max=float(draw(st.sampled_from([8, 64, 512]))),
        max_num_seqs=float(draw(st.integers(1, 4096))),
        kv_requests=draw(st.floats(0.0, 1e5)),
        token_budget=draw(st.floats(1.0, 65_536.0)),
        load_s=draw(st.floats(0.0, 2.0)),
        max_waiting=25_000.0,
    )


def load_of(
    rates: dict[float, float],
    prompt: float = 250.0,
    output: float = 150.0,
    output_cv: float = 0.7,
    arrivals_cv: float = 1.0,
) -> Load:
    asked = np.array(sorted(rate for rate in rates if rate > 0.0))
    counts = np.array([rates[rate] for rate in asked])
    return Load(
        rates_rps=asked,
        gaps_s=1.0 / asked,
        counts=counts,
        adapters=sum(rates.values()),
        total_rps=float((counts * asked).sum()),
        prompt=prompt,
        output=output,
        held=prompt + output / 2,
        output_cv=output_cv,
        mean_rank=16.0,
        max_rank=32.0,
        arrivals_cv=arrivals_cv,
    )


ASKED = st.floats(-6.0, 2.0).map(lambda exponent: 10.0**exponent)
RATES = st.one_of(st.just(0.0), ASKED)


@st.composite
def loads(draw: st.DrawFn, rates: st.SearchStrategy[float] = RATES) -> Load:
    counts = draw(st.dictionaries(rates, st.integers(1, 200).map(float), min_size=1, max_size=5))
    lengths = draw(st.floats(1, 2e4)), draw(st.floats(1, 2e4))
    return load_of(counts, *lengths, draw(st.floats(0, 3)), draw(st.floats(0, 10)))


def scaled(load: Load, factor: float) -> Load:
    """Return the load with every rate multiplied."""
    return load._replace(
        rates_rps=load.rates_rps * factor, gaps_s=load.gaps_s / factor, total_rps=load.total_rps * factor
    )


def multiplied(load: Load, factor: float) -> Load:
    """Return the load with so many times as many adapters of every rate."""
    return load._replace(
        counts=load.counts * factor, adapters=load.adapters * factor, total_rps=load.total_rps * factor
    )


@given(gpus(), loads())
def test_every_figure_is_finite_and_every_share_a_share(gpu: Gpu, load: Load) -> None:
    state = fluid(gpu, load, HORIZON_S)
    assert all(np.isfinite(value) and value >= 0.0 for value in state)
    assert state.served_rps <= state.capacity_rps * (1 + 1e-9)
    assert 0.0 < state.slots_share <= 1.0 + 1e-9
    assert 0.0 <= state.load_share < 1.0 + 1e-9
    assert state.batch_over_limit <= 1.0 + 1e-9
    assert 0.0 <= state.full_adapters <= gpu.a_max
    assert state.step_s > 0.0
    assert state.capacity_rps > 0.0


@given(gpus(), st.floats(0.001, 100.0))
def test_a_lone_adapter_never_waits_for_a_slot(gpu: Gpu, rate: float) -> None:
    state = fluid(gpu, load_of({rate: 1.0}), HORIZON_S)
    assert state.slot_wait_s == pytest.approx(0.0, abs=1e-9)
    assert state.slots_share == 1.0


@given(gpus(), loads())
def test_where_every_adapter_has_a_slot_none_waits_and_nothing_is_loaded(gpu: Gpu, load: Load) -> None:
    state = fluid(gpu._replace(a_max=load.adapters), load, HORIZON_S)
    assert state.slot_wait_s == pytest.approx(0.0, abs=1e-9)
    assert state.slots_share == 1.0
    assert state.load_share == 0.0


@given(gpus(), st.integers(1, 300))
def test_without_requests_nothing_waits_and_nothing_is_served(gpu: Gpu, idle: int) -> None:
    state = fluid(gpu, load_of({0.0: float(idle)}), HORIZON_S)
    assert state.slot_wait_s == pytest.approx(0.0, abs=1e-9)
    assert state.slots_share == 1.0
    assert state.served_rps == pytest.approx(0.0, abs=1e-9)


@given(gpus(), loads(ASKED))
def test_idle_adapters_take_no_load_away(gpu: Gpu, load: Load) -> None:
    """With a slot for everybody, who never asks changes nothing under a model without a cost per slot."""
    gpu = gpu._replace(form=ADDITIVE.code, k=PLAIN, a_max=1e4)
    more = load._replace(adapters=load.adapters + 9.0)
    assert fluid(gpu, more, HORIZON_S) == pytest.approx(fluid(gpu, load, HORIZON_S), rel=1e-9, abs=1e-12)


@given(gpus(), loads(), st.floats(1.01, 50.0))
def test_seats_and_memory_raise_the_capacity_where_nothing_else_binds(
    gpu: Gpu, load: Load, factor: float
) -> None:
    free = gpu._replace(form=ADDITIVE.code, k=PLAIN, a_max=load.adapters, token_budget=MANY)
    for name in ("max_num_seqs", "kv_requests"):
        other = "kv_requests" if name == "max_num_seqs" else "max_num_seqs"
        few = free._replace(**{name: gpu.max_num_seqs, other: MANY})
        many = few._replace(**{name: factor * gpu.max_num_seqs})
        assert batch_limit(many, load) > batch_limit(few, load)
        assert fluid(many, load, HORIZON_S).capacity_rps > fluid(few, load, HORIZON_S).capacity_rps


@given(gpus(), loads(), st.floats(1.0, 50.0))
def test_what_does_not_bind_changes_no_capacity(gpu: Gpu, load: Load, factor: float) -> None:
    gpu = gpu._replace(max_num_seqs=8.0, kv_requests=20.0, a_max=load.adapters)
    more = gpu._replace(kv_requests=20.0 * factor)
    assert fluid(more, load, HORIZON_S).capacity_rps == fluid(gpu, load, HORIZON_S).capacity_rps


@given(gpus(), loads(), st.floats(1.05, 20.0))
def test_longer_outputs_lower_the_capacity(gpu: Gpu, load: Load, factor: float) -> None:
    gpu = gpu._replace(form=ADDITIVE.code, k=PLAIN, a_max=load.adapters)
    gpu = gpu._replace(token_budget=max(gpu.token_budget, load.prompt + load.output))
    longer = load._replace(output=load.output * factor, held=load.held * factor)
    shorter = fluid(gpu, load, HORIZON_S).capacity_rps
    assert fluid(gpu, longer, HORIZON_S).capacity_rps < shorter * (1 + 1e-9)


@given(gpus(), loads(ASKED), st.floats(1.0, 30.0))
def test_more_load_never_raises_the_share_that_is_expected_to_be_served(
    gpu: Gpu, load: Load, factor: float
) -> None:
    shares = [
        min(1.0, fluid(gpu, asked, HORIZON_S).served_rps / asked.total_rps)
        for asked in (load, scaled(load, factor))
    ]
    assert shares[1] <= shares[0] + 0.02


@given(gpus(), loads())
def test_adapters_of_one_rate_count_alike_together_and_apart(gpu: Gpu, load: Load) -> None:
    apart = load._replace(
        rates_rps=np.repeat(load.rates_rps, 2),
        gaps_s=np.repeat(load.gaps_s, 2),
        counts=np.column_stack([0.25 * load.counts, 0.75 * load.counts]).ravel(),
    )
    together, split = fluid(gpu, load, HORIZON_S), fluid(gpu, apart, HORIZON_S)
    assert split == pytest.approx(together, rel=1e-3, abs=1e-9)


@given(gpus(), loads(ASKED), st.floats(1.0, 4.0))
def test_more_adapters_are_never_served_a_larger_share(gpu: Gpu, load: Load, factor: float) -> None:
    more = multiplied(load, 1.0 + factor)
    shares = [min(1.0, fluid(gpu, asked, HORIZON_S).served_rps / asked.total_rps) for asked in (load, more)]
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
