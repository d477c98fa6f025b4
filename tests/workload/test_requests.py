"""Requests are independent Poisson processes with the lengths asked for, or the trace itself."""

import numba
import numpy as np
import pytest
from scipy import stats

from capplan import Adapter, InputError, Lengths, Workload
from capplan.spec import Trace
from capplan.workload import draw_requests, length_table

LIMIT = 8192


def workload(rates, **changes):
    fields = {
        "base_model": "m",
        "adapters": [Adapter(name=f"a{i}", rank=8, rate_rps=rate) for i, rate in enumerate(rates)],
        "prompt_tokens": Lengths(mean=223, std=245),
        "output_tokens": Lengths(mean=194, std=206),
    }
    return Workload(**(fields | changes))


def same(left, right):
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def test_another_seed_gives_other_requests():
    w = workload([5.0])
    assert not same(draw_requests(w, 60, 0, LIMIT), draw_requests(w, 60, 1, LIMIT))


def test_each_adapter_is_a_poisson_process_of_its_rate_and_independent_of_the_others():
    rates, window_s, windows = [0.5, 2.0, 4.0], 1.0, 20_000
    r = draw_requests(workload(rates), window_s * windows, 11, LIMIT)
    slot = r.arrival_ns // int(window_s * 1e9)
    counts = np.stack([np.bincount(slot[r.adapter == i + 1], minlength=windows) for i in range(len(rates))])
    for rate, seen in zip(rates, counts, strict=True):
        top = int(stats.poisson.ppf(0.999, rate))
        observed = np.bincount(np.minimum(seen, top), minlength=top + 1)
        probability = np.append(stats.poisson.pmf(np.arange(top), rate), stats.poisson.sf(top - 1, rate))
        assert stats.chisquare(observed, probability * windows).pvalue > 0.001
    correlation = np.corrcoef(counts)[np.triu_indices(len(rates), 1)]
    assert np.all(np.abs(correlation) < 4 / np.sqrt(windows))


def test_gaps_are_exponential():
    r = draw_requests(workload([3.0, 4.0]), 5000, 3, LIMIT)
    assert stats.kstest(np.diff(r.arrival_ns) / 1e9, "expon", args=(0, 1 / 7)).pvalue > 0.001


def test_lengths_have_the_means_asked_for_and_adapters_their_own():
    own = Adapter(
        name="own", rank=8, rate_rps=20.0, prompt_tokens=Lengths(mean=900), output_tokens=Lengths(mean=7)
    )
    common = Adapter(name="common", rank=8, rate_rps=20.0)
    r = draw_requests(workload([], adapters=[own, common]), 10_000, 2, LIMIT)
    assert set(r.prompt_tokens[r.adapter == 1]) == {900}
    assert set(r.output_tokens[r.adapter == 1]) == {7}
    n = (r.adapter == 2).sum()
    for column, lengths in (
        (r.prompt_tokens, Lengths(mean=223, std=245)),
        (r.output_tokens, Lengths(mean=194, std=206)),
    ):
        assert column[r.adapter == 2].mean() == pytest.approx(lengths.mean, abs=4 * lengths.std / np.sqrt(n))


def test_lengths_do_not_move_arrivals():
    short = workload([2.0, 1.0], prompt_tokens=Lengths(mean=5))
    left, right = draw_requests(workload([2.0, 1.0]), 100, 4, LIMIT), draw_requests(short, 100, 4, LIMIT)
    assert np.array_equal(left.arrival_ns, right.arrival_ns)
    assert np.array_equal(left.adapter, right.adapter)
    assert np.array_equal(left.output_tokens, right.output_tokens)


def test_a_longer_horizon_only_adds_requests():
    w = workload([2.0, 1.0])
    short, long = draw_requests(w, 100, 4, LIMIT), draw_requests(w, 300, 4, LIMIT)
    n = len(short.arrival_ns)
    assert 0 < n < len(long.arrival_ns)
    assert same(short, [column[:n] for column in long])
    assert long.arrival_ns[n] >= 100e9


def test_the_number_of_requests_is_poisson():
    w = workload([0.25])
    counts = [len(draw_requests(w, 16, seed, LIMIT).arrival_ns) for seed in range(4000)]
    observed = np.bincount(np.minimum(counts, 9), minlength=10)
    probability = np.append(stats.poisson.pmf(np.arange(9), 4.0), stats.poisson.sf(8, 4.0))
    assert stats.chisquare(observed, probability * 4000).pvalue > 0.001


@pytest.mark.parametrize("rates", [[1.6, 0.8, 0.4] * 40, [100.0, 1.0, 0.0, 1e-3], [1.0] * 3000])
def test_requests_choose_adapters_in_proportion_to_rates(rates):
    drawn = draw_requests(workload(rates), 400_000 / sum(rates), 8, LIMIT).adapter
    expected = np.array(rates) * len(drawn) / sum(rates)
    observed = np.bincount(drawn, minlength=len(rates) + 1)[1:]
    often = expected > 10
    assert (
        stats.chisquare(
            np.append(observed[often], observed[~often].sum() + 1),
            np.append(expected[often], expected[~often].sum() + 1),
            sum_check=False,
        ).pvalue
        > 0.001
    )


def assert_distributed(drawn, lengths):
    """Assert that each length is drawn as often as its probability says, by chi-square."""
    table = length_table(lengths, LIMIT)
    seen = np.bincount(drawn, minlength=table.tokens[-1] + 1)[table.tokens]
    expected = table.probabilities * len(drawn)
    often = expected > 20
    statistic = ((seen - expected)[often] ** 2 / expected[often]).sum()
    assert abs(statistic - often.sum()) < 5 * np.sqrt(2 * often.sum())


def test_each_length_is_drawn_as_often_as_its_probability_says():
    r = draw_requests(workload([100.0]), 4000, 6, LIMIT)
    assert_distributed(r.prompt_tokens, Lengths(mean=223, std=245))
    assert_distributed(r.output_tokens, Lengths(mean=194, std=206))


def test_prompt_output_adapter_and_gap_of_a_request_are_independent():
    r = draw_requests(workload([30.0, 60.0]), 3000, 1, LIMIT)
    columns = np.stack([np.diff(r.arrival_ns), *(column[1:] for column in r[1:4])])
    correlation = np.corrcoef(columns)[np.triu_indices(4, 1)]
    assert np.abs(correlation).max() < 5 / np.sqrt(columns.shape[1])


def test_a_prompt_limit_cuts_prompts_after_they_were_drawn():
    w = workload([20.0])
    free, cut = draw_requests(w, 100, 3, LIMIT), draw_requests(w, 100, 3, LIMIT, 150)
    assert np.array_equal(cut.prompt_tokens, np.minimum(free.prompt_tokens, 150))
    assert np.array_equal(cut.output_tokens, free.output_tokens)


def test_idle_adapters_draw_nothing():
    assert all(len(column) == 0 for column in draw_requests(workload([0.0, 0.0]), 3600, 0, LIMIT))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"duration_s": 0.0}, "duration_s: must be a number of seconds above 0"),
        ({"duration_s": float("nan")}, "duration_s: must be"),
        ({"duration_s": float("inf")}, "duration_s: must be"),
        ({"seed": -1}, "seed: must be a whole number >= 0"),
        ({"max_model_len": 100}, r"Lengths\.mean: must be within 1 to 100"),
        ({"duration_s": 1e9}, "must not exceed 1e\\+08 requests"),
    ],
)
def test_parameters_out_of_range_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        draw_requests(workload([1.0]), **({"duration_s": 10.0, "seed": 0, "max_model_len": LIMIT} | changes))


def traced():
    trace = Trace.from_arrays(
        [0.0, 0.25, 1.0, 1.5], ["a2", "a0", "a2", "a0"], [10, 20, 30, 40], [1, 2, 3, 9000]
    )
    return workload([1.0, 1.0, 1.0], trace=trace)


def test_a_trace_is_replayed_as_recorded_whatever_the_seed():
    r = draw_requests(traced(), 100.0, 0, LIMIT)
    assert r.arrival_ns.tolist() == [0, 250_000_000, 1_000_000_000, 1_500_000_000]
    assert r.adapter.tolist() == [3, 1, 3, 1]
    assert r.prompt_tokens.tolist() == [10, 20, 30, 40]
    assert r.output_tokens.tolist() == [1, 2, 3, 9000]
    assert same(r, draw_requests(traced(), 100.0, 99, LIMIT))


def test_requests_of_a_trace_need_no_compiled_code_of_their_own():
    drawn = draw_requests(workload([1.0, 1.0, 1.0]), 1.0, 0, LIMIT)
    assert numba.typeof(draw_requests(traced(), 100.0, 0, LIMIT)) == numba.typeof(drawn)


def test_a_replay_ends_at_the_duration_and_follows_a_subset():
    assert draw_requests(traced(), 1.0, 0, LIMIT).arrival_ns.tolist() == [0, 250_000_000]
    part = draw_requests(traced().subset(["a2", "a1"]), 100.0, 0, LIMIT)
    assert part.adapter.tolist() == [2, 2]
    assert part.prompt_tokens.tolist() == [10, 30]


def test_a_shared_adapter_is_drawn_at_its_share_of_the_rate():
    w = workload([4.0, 4.0]).subset(["a1"], {"a1": 0.25})
    assert len(draw_requests(w, 10_000, 0, LIMIT).adapter) == pytest.approx(10_000, abs=500)


def test_tables_are_built_once():
    lengths = Lengths(mean=223, std=245)
    assert length_table(lengths, LIMIT) is length_table(Lengths(mean=223, std=245), LIMIT)
