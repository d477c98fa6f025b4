"""Every arrival process keeps the adapter's mean rate; what else it does is what its name says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from capplan import Adapter, InputError, Lengths, Workload
from capplan.workload import draw_requests

LIMIT = 8192
HEAVY = ({"process": "gamma", "cv": 3}, {"process": "weibull", "cv": 3}, {"process": "lognormal", "cv": 3})
PROCESSES = (
    "deterministic",
    *HEAVY,
    {"process": "gamma", "cv": 0.3},
    {"process": "weibull", "cv": 0.3},
    {"process": "lognormal", "cv": 0.3},
)
MODULATIONS = (
    {"kind": "steps", "steps": [[0, 1], [20, 0], [30, 5.5]]},
    {"kind": "steps", "steps": [[0, 0], [5, 2]], "period_s": 25},
    {"kind": "diurnal", "amplitude": 1.0, "period_s": 50},
    {"kind": "diurnal", "amplitude": 0.5, "period_s": 20, "phase": 0.25},
    {"kind": "burst", "factor": 10, "every_s": 20, "length_s": 2, "at_s": 18},
    {"kind": "shifting_skew", "from_rank": 32, "to_rank": 8, "swing": 1.0},
    {"kind": "shifting_skew", "from_rank": 32, "to_rank": 8, "over_s": 50},
)
UNPREDICTABLE = (
    {"process": "unpredictable", "every_s": 10},
    {"process": "unpredictable", "every_s": 10, "factor": 1.5, "lognormal_gaps": "published_client"},
)


def workload(rates, arrivals, ranks=(8, 16, 64), **changes):
    adapters = [
        Adapter(name=f"a{i}", rank=ranks[i % len(ranks)], rate_rps=rate) for i, rate in enumerate(rates)
    ]
    fields = {"base_model": "m", "adapters": adapters, "arrivals": arrivals}
    lengths = {"prompt_tokens": Lengths(mean=10), "output_tokens": Lengths(mean=5)}
    return Workload(**(fields | lengths | changes))


def moved(modulation, process="poisson", **more):
    return {"process": process, "modulation": modulation, **more}


EVERYTHING = [
    "poisson",
    *PROCESSES,
    *UNPREDICTABLE,
    *(moved(m) for m in MODULATIONS),
    *(moved(m, "weibull", cv=2.0) for m in MODULATIONS),
]


@settings(max_examples=100)
@given(
    arrivals=st.sampled_from(EVERYTHING),
    rates=st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 5)), min_size=1, max_size=6),
    seed=st.integers(0, 2**63),
    duration_s=st.floats(0.001, 100),
    limit=st.integers(500, 10_000),
    sticky=st.sampled_from([None, {"last": 1, "probability": 0.5}, {"last": 3, "probability": 0.5}]),
)
def test_requests_are_sorted_in_range_repeatable_and_of_busy_adapters(
    arrivals, rates, seed, duration_s, limit, sticky
):
    lengths = {"prompt_tokens": Lengths(mean=223, std=245), "output_tokens": Lengths(mean=194, std=206)}
    w = workload(rates, arrivals, stickiness=sticky, **lengths)
    r = draw_requests(w, duration_s, seed, limit)
    assert [column.dtype for column in r] == [np.int64, *[np.int32] * 4]
    assert len({len(column) for column in r[:4]}) == 1
    assert len(r.predicted_tokens) == 0
    assert np.all(np.diff(r.arrival_ns) >= 0)
    assert np.all((r.arrival_ns >= 0) & (r.arrival_ns < duration_s * 1e9))
    assert all(column.min() >= 1 and column.max() <= limit for column in r[2:4] if column.size)
    assert all(adapter >= 1 and rates[adapter - 1] > 0 for adapter in r.adapter)
    again = draw_requests(w, duration_s, seed, limit)
    assert all(np.array_equal(a, b) for a, b in zip(r, again, strict=True))


def counts_of(arrivals, duration_s, copies=4000, rate=0.4, rank=8, windows=1):
    """Requests per copy of one adapter, which are independent, and per window."""
    w = workload([rate] * copies, arrivals, ranks=(rank,))
    r = draw_requests(w, duration_s, 5, LIMIT)
    window = (r.arrival_ns * windows / (duration_s * 1e9)).astype(int)
    return np.bincount((r.adapter - 1) * windows + window, minlength=copies * windows).reshape(
        copies, windows
    )


def agrees(counts, mean):
    """Whether a mean lies within 4.5 standard errors of what was counted."""
    return abs(counts.mean() - mean) <= 4.5 * counts.std() / np.sqrt(len(counts)) + 1e-12


@pytest.mark.parametrize("arrivals", [*PROCESSES, *(moved(m, "gamma", cv=2.0) for m in MODULATIONS[:-1])])
@pytest.mark.parametrize("rank", [8, 64])
def test_the_mean_rate_is_the_adapters(arrivals, rank):
    assert agrees(counts_of(arrivals, 100.0, rank=rank), 40.0)


@pytest.mark.parametrize("arrivals", PROCESSES)
def test_a_process_is_as_busy_at_the_start_as_at_the_end(arrivals):
    """The first second of a process that began long before is like every other second."""
    windows = counts_of(arrivals, 10.0, windows=10)
    assert agrees(windows[:, 0], 0.4)
    assert agrees(windows[:, -1], 0.4)


@pytest.mark.parametrize("arrivals", [p for p in PROCESSES if p != "deterministic"])
def test_gaps_spread_as_asked_for(arrivals):
    r = draw_requests(workload([50.0], arrivals), 4000.0, 0, LIMIT)
    gaps = np.diff(r.arrival_ns)
    # A log-normal of cv 3 has so heavy a tail that 200,000 gaps know its spread to a few percent only.
    assert gaps.std() / gaps.mean() == pytest.approx(arrivals["cv"], rel=0.1)


@pytest.mark.parametrize(
    ("arrivals", "law"),
    [
        ({"process": "gamma", "cv": 2}, stats.gamma(0.25, scale=4)),
        ({"process": "weibull", "cv": 1}, stats.expon()),
        ({"process": "lognormal", "cv": 1}, stats.lognorm(np.sqrt(np.log(2)), scale=2**-0.5)),
        (moved(MODULATIONS[0]), None),
    ],
)
def test_gaps_have_the_distribution_asked_for(arrivals, law):
    r = draw_requests(workload([4.0], arrivals), 3000.0, 1, LIMIT)
    if law is None:  # on its own clock a modulated Poisson process is a Poisson process
        t = r.arrival_ns / 1e9
        gaps = (
            np.diff(np.interp(t, [0, 20, 30, 3000], [0, 20, 20, 20 + 2970 * 5.5])) / (20 + 2970 * 5.5) * 3000
        )
        law = stats.expon()
    else:
        gaps = np.diff(r.arrival_ns / 1e9)
    assert stats.kstest(gaps * 4.0, law.cdf).pvalue > 0.001


def test_deterministic_gaps_are_equal_and_phases_are_not():
    r = draw_requests(workload([0.5, 0.5], "deterministic"), 100.0, 0, LIMIT)
    starts = [r.arrival_ns[r.adapter == adapter] for adapter in (1, 2)]
    assert all(np.abs(np.diff(own) - 2_000_000_000).max() <= 1 for own in starts)
    assert starts[0][0] != starts[1][0]


def test_adapters_are_independent():
    counts = counts_of(moved(MODULATIONS[4], "gamma", cv=2.0), 2000.0, copies=2, windows=1000, rate=2.0)
    outside = np.arange(1000) % 10 != 9  # bursts come to all at once
    assert abs(np.corrcoef(counts[:, outside])[0, 1]) < 4 / np.sqrt(outside.sum())


def shape_of(modulation, windows, rank=8, copies=2000):
    """Rate in equal windows of 100 s, over the mean rate."""
    counts = counts_of(moved(modulation), 100.0, copies=copies, rate=1.0, rank=rank, windows=windows)
    return counts.mean(axis=0) / (100 / windows)


@pytest.mark.parametrize(
    ("modulation", "expected"),
    [
        ({"kind": "steps", "steps": [[0, 1], [25, 3]]}, [0.4, 1.2, 1.2, 1.2]),
        ({"kind": "steps", "steps": [[0, 1], [25, 3]], "period_s": 50}, [0.5, 1.5, 0.5, 1.5]),
        ({"kind": "steps", "steps": [[0, 2], [100, 9]]}, [1, 1, 1, 1]),
        ({"kind": "burst", "factor": 7, "every_s": 50, "length_s": 25}, [1.75, 0.25, 1.75, 0.25]),
        ({"kind": "burst", "factor": 5, "every_s": 100, "length_s": 25, "at_s": 50}, [0.5, 0.5, 2.5, 0.5]),
        (
            {"kind": "diurnal", "amplitude": 0.5, "period_s": 100},
            [1 + 1 / np.pi, 1 + 1 / np.pi, 1 - 1 / np.pi, 1 - 1 / np.pi],
        ),
        (
            {"kind": "diurnal", "amplitude": 1.0, "period_s": 100, "phase": 0.5},
            [1 - 2 / np.pi] * 2 + [1 + 2 / np.pi] * 2,
        ),
        ({"kind": "shifting_skew", "from_rank": 128, "to_rank": 4}, [1, 1, 1, 1]),
        ({"kind": "shifting_skew", "from_rank": 8, "to_rank": 4, "swing": 0.8}, [1.6, 1.2, 0.8, 0.4]),
        ({"kind": "shifting_skew", "from_rank": 9, "to_rank": 8, "swing": 0.8}, [0.4, 0.8, 1.2, 1.6]),
        (
            {"kind": "shifting_skew", "from_rank": 9, "to_rank": 8, "swing": 0.8, "over_s": 50},
            [0.6, 1.4, 1.8, 1.8],
        ),
    ],
)
def test_the_rate_moves_as_the_modulation_says(modulation, expected):
    assert shape_of(modulation, 4) == pytest.approx(expected, rel=0.02)


def test_loraserves_shifting_skew_is_reproduced():
    """Rank 128 falls from 1/2 to 1/8 of all requests, rank 8 rises from 1/8 to 1/2, the total stays."""
    rates = {8: 0.3125, 16: 0.125, 32: 0.125, 64: 0.125, 128: 0.3125}
    adapters = [Adapter(name=f"r{rank}", rank=rank, rate_rps=1000 * rate) for rank, rate in rates.items()]
    arrivals = moved({"kind": "shifting_skew", "from_rank": 128, "to_rank": 8})
    r = draw_requests(workload([], arrivals, adapters=adapters), 100.0, 0, LIMIT)
    for window, tau in ((0, 0.05), (9, 0.95)):
        here = r.adapter[r.arrival_ns // 10**10 == window]
        shares = np.bincount(here, minlength=6)[1:] / len(here)
        expected = [0.125 + 0.375 * tau, 0.125, 0.125, 0.125, 0.5 - 0.375 * tau]
        assert shares == pytest.approx(expected, abs=0.015)
        assert len(here) == pytest.approx(10_000, rel=0.05)


def test_unpredictable_rates_double_or_halve_at_every_border_and_stay_clipped():
    process = {"process": "unpredictable", "every_s": 100, "clip": 4}
    counts = counts_of(process, 800.0, copies=200, rate=20.0, windows=8) / 2000
    assert counts[:, 0].mean() == pytest.approx(1, rel=0.05)  # the first rate is the one given
    steps = np.log2(counts[:, 1:] / counts[:, :-1])
    assert np.all(np.abs(np.abs(steps[:, 0]) - 1) < 0.4)
    assert set(np.unique(np.rint(np.log2(counts)))) == {-2, -1, 0, 1, 2}


def test_the_published_client_forgets_the_rate_in_half_of_its_intervals():
    """LogN(0, rate) seconds: a rate of 0.01 makes gaps of about 1 s, not of 100 s."""
    process = {"process": "unpredictable", "every_s": 100, "lognormal_gaps": "published_client"}
    counts = counts_of(process, 100.0, copies=400, rate=0.01)[:, 0]
    forgetful = counts > 50
    assert forgetful.mean() == pytest.approx(0.5, abs=0.12)
    assert counts[forgetful].mean() == pytest.approx(99, abs=1)
    assert counts[~forgetful].mean() == pytest.approx(1, abs=0.4)


def test_a_subset_keeps_process_and_modulation():
    w = workload([4.0, 4.0, 4.0], moved(MODULATIONS[5]))
    part = w.subset(["a2"], {"a2": 0.5})
    assert part.arrivals == w.arrivals
    r = draw_requests(part, 1000.0, 0, LIMIT)
    assert len(r.adapter) == pytest.approx(2000, abs=200)
    assert (r.arrival_ns < 500e9).mean() == pytest.approx(0.75, abs=0.04)  # rank 64 fades


def shares_of(stickiness, rates, duration_s=4000.0):
    r = draw_requests(workload(rates, "poisson", stickiness=stickiness), duration_s, 3, LIMIT)
    return r, np.bincount(r.adapter, minlength=len(rates) + 1)[1:] / len(r.adapter)


def test_repeating_the_last_adapter_keeps_shares_and_makes_runs():
    rates = [8.0, 4.0, 2.0, 1.0]
    r, shares = shares_of({"last": 1, "probability": 0.6}, rates, 20_000.0)
    assert shares == pytest.approx(np.array(rates) / 15, abs=0.01)
    chance = ((np.array(rates) / 15) ** 2).sum()
    assert (np.diff(r.adapter) == 0).mean() == pytest.approx(0.6 + 0.4 * chance, abs=0.01)


def test_repeating_one_of_all_adapters_draws_shares_together():
    """With every adapter among the last ones, a repetition is a uniform choice, as the guide says."""
    rates = np.array([8.0, 4.0, 2.0, 1.0])
    _, shares = shares_of({"last": 4, "probability": 0.5}, rates.tolist(), 20_000.0)
    assert shares == pytest.approx(0.5 * rates / 15 + 0.5 / 4, abs=0.01)


def test_stickiness_of_zero_and_other_lengths_leave_the_requests_as_they_are():
    plain, _ = shares_of(None, [3.0, 1.0])
    never, _ = shares_of({"last": 2, "probability": 0}, [3.0, 1.0])
    assert all(np.array_equal(a, b) for a, b in zip(plain, never, strict=True))
    sticky, _ = shares_of({"last": 2, "probability": 0.9}, [3.0, 1.0])
    assert np.array_equal(plain.arrival_ns, sticky.arrival_ns)
    assert np.array_equal(plain.prompt_tokens, sticky.prompt_tokens)


def test_repetitions_come_from_the_last_adapters_only():
    r, _ = shares_of({"last": 3, "probability": 1.0}, [1.0] * 50, 200.0)
    assert len(set(r.adapter.tolist())) == 1  # the first request's adapter is all there ever is to repeat
    r, _ = shares_of({"last": 3, "probability": 0.9}, [1.0] * 50, 2000.0)
    recent: list[int] = []
    outside = 0
    for adapter in r.adapter.tolist():
        outside += adapter not in recent[-3:]
        recent = [*(a for a in recent if a != adapter), adapter]
    assert outside / len(r.adapter) == pytest.approx(0.1, abs=0.01)


def test_too_many_requests_are_refused_before_they_are_drawn():
    process = {"process": "unpredictable", "lognormal_gaps": "published_client", "every_s": 1e6}
    with pytest.raises(InputError, match="must not exceed 1e\\+08 requests"):
        draw_requests(workload([0.001] * 2000, process), 1e6, 0, LIMIT)
    steps = {"kind": "steps", "steps": [[0, 0], [100, 1]]}
    with pytest.raises(InputError, match="steps: must have a factor above 0 within the duration"):
        draw_requests(workload([1.0], moved(steps)), 50.0, 0, LIMIT)
