"""Definitions of ARCHITECTURE section 4: the twin's own requests must give the twin's own metrics."""

import numpy as np
import pytest

from capplan import Profile, simulate_detailed
from capplan.profiling.load import LoadMetrics
from capplan.profiling.load._record import EventLoopLag, LogHistogram, MeasurementWindow, RequestRecords
from capplan.profiling.load._result import LagLimits, adapter_metrics, client_health, overall_metrics
from capplan.twin import DetailedResult
from tests.cli.examples import profile_document
from tests.profiling.load.test_requests import workload

DURATION_S = 60.0

KINDS = ("finished", "unfinished", "rejected", "http_500")


def twin(rate_rps: float, max_in_flight: int | None = None) -> DetailedResult:
    document = profile_document()
    host = document["host"]["coefficients"]
    host["request_ms"] = {"value": 0.0}
    host["client_itl_factor"] = {"value": 1.0}
    return simulate_detailed(
        workload(rate_rps),
        Profile.model_validate(document),
        a_max=4,
        s_max=8,
        duration_s=DURATION_S,
        max_num_seqs=8,
        max_model_len=512,
        max_in_flight=max_in_flight,
    )


def recorded(detail: DetailedResult) -> RequestRecords:
    """Return the twin's requests as a client observes them."""
    table = detail.requests
    kind = np.array([0, 1, 1, 2], np.int16)[table.status]
    return RequestRecords(
        names=table.adapters,
        adapter=table.adapter,
        due_s=table.arrival_s,
        sent_s=np.where(kind == 2, np.nan, table.arrival_s),
        first_s=table.first_token_s,
        last_s=table.finish_s,
        ended_s=table.finish_s,
        prompt_tokens=table.prompt_tokens.astype(np.int32),
        output_tokens=table.output_tokens.astype(np.int32),
        events=table.output_tokens.astype(np.int32),
        kind=kind,
        kinds=KINDS,
    )


@pytest.mark.parametrize(("rate_rps", "limit"), [(0.5, None), (4.0, None), (30.0, None), (30.0, 20)])
def test_requests_of_the_twin_give_its_metrics(rate_rps: float, limit: int | None) -> None:
    detail = twin(rate_rps, limit)
    got = overall_metrics(recorded(detail), MeasurementWindow(0.0, DURATION_S))
    twin_result = detail.result
    for name in ("throughput_tok_s", "input_tok_s", "output_tok_s"):
        assert getattr(got, name) == pytest.approx(getattr(twin_result, name))
    # The twin's table has the outputs of rejected requests as drawn, without an end at max_model_len.
    assert got.offered_tok_s == pytest.approx(twin_result.offered_tok_s, rel=1e-4)
    assert (got.completed, got.submitted, got.rejected) == (
        twin_result.completed,
        twin_result.submitted,
        twin_result.rejected,
    )
    for name in ("ttft_s", "e2e_s", "tpot_ms", "tpt_ms"):
        for statistic in ("mean", "p50", "p90", "p95", "p99"):
            assert getattr(getattr(got, name), statistic) == pytest.approx(
                getattr(twin_result, f"{name}_{statistic}")
            )
    assert got.ttft_s_mean_charged == pytest.approx(twin_result.ttft_s_mean_charged)
    assert got.itl_ms.mean == pytest.approx(twin_result.itl_ms_mean)
    # A client cannot see a request that is in prefill at the end: for it, that one waits.
    assert got.served_fraction == pytest.approx(twin_result.served_fraction, abs=0.02)
    assert got.served_fraction <= twin_result.served_fraction + 1e-12
    assert got.starved == twin_result.starved


def test_metrics_of_adapters_add_up_to_those_of_all() -> None:
    record, window = recorded(twin(30.0, 20)), MeasurementWindow(10.0, 50.0)
    whole, parts = overall_metrics(record, window), adapter_metrics(record, window)
    assert [each.name for each in parts] == [adapter.name for adapter in workload().adapters]
    for name in ("submitted", "completed", "failed", "rejected", "executing", "waiting", "throughput_tok_s"):
        assert sum(getattr(each, name) for each in parts) == pytest.approx(getattr(whole, name))
    states = whole.failed + whole.rejected + whole.executing + whole.waiting
    assert states <= whole.submitted


def simple(**changes: object) -> LoadMetrics:
    """Four requests: completed before the window, in it, executing at its end, failed."""
    columns: dict[str, object] = {
        "names": ("", "a"),
        "adapter": np.ones(4, np.int32),
        "due_s": np.array([0.0, 1.0, 2.0, 3.0]),
        "sent_s": np.array([0.0, 1.0, 2.5, 3.0]),
        "first_s": np.array([0.5, 2.0, 3.0, np.nan]),
        "last_s": np.array([0.9, 4.0, 9.0, np.nan]),
        "ended_s": np.array([0.9, 4.0, 9.0, 3.1]),
        "prompt_tokens": np.full(4, 10, np.int32),
        "output_tokens": np.full(4, 5, np.int32),
        "events": np.array([5, 3, 5, 0], np.int32),
        "kind": np.array([0, 0, 0, 3], np.int16),
        "kinds": KINDS,
    }
    return overall_metrics(RequestRecords(**columns | changes), MeasurementWindow(1.0, 5.0))  # type: ignore[arg-type]


def test_only_requests_that_complete_within_the_window_count() -> None:
    got = simple()
    assert (got.completed, got.submitted, got.failed, got.executing, got.waiting) == (1, 4, 1, 1, 0)
    assert got.throughput_tok_s == 15 / 4
    assert got.offered_tok_s == 45 / 4
    assert got.served_fraction == 30 / 45
    assert got.ttft_s.mean == 1.0


def test_gaps_are_those_between_events_and_between_tokens() -> None:
    got = simple()
    assert got.itl_ms.mean == 2000.0 / 2  # three events
    assert got.token_gap_ms_mean == 2000.0 / 4  # five tokens


def test_a_run_without_answers_has_no_latencies() -> None:
    got = simple(kind=np.full(4, 3, np.int16))
    assert (got.completed, got.failed, got.throughput_tok_s, got.served_fraction) == (0, 3, 0.0, 0.0)
    assert got.ttft_s.mean is None
    assert got.itl_ms.mean is None


def health(lag_ms: float, loop_lag_ms: float = 0.1) -> bool:
    record = recorded(twin(0.5))
    loop_lag = EventLoopLag()
    loop_lag.late.add(np.full(100, loop_lag_ms / 1e3))
    late = RequestRecords(**{**vars(record), "sent_s": record.due_s + lag_ms / 1e3})
    return client_health(late, MeasurementWindow(0.0, DURATION_S), loop_lag, LagLimits()).kept_up


def test_a_late_client_did_not_keep_up() -> None:
    assert health(1.0)
    assert not health(8.0)
    assert not health(1.0, loop_lag_ms=300.0)


def test_unsent_requests_are_late_until_the_end() -> None:
    record = recorded(twin(0.5))
    never = RequestRecords(
        **{**vars(record), "sent_s": np.full(len(record), np.nan), "kind": np.ones(len(record), int)}
    )
    health = client_health(never, MeasurementWindow(0.0, DURATION_S), EventLoopLag())
    assert not health.kept_up
    assert health.lag_ms_max == pytest.approx(1e3 * (DURATION_S - record.due_s[0]))


def test_percentiles_of_gaps_are_exact_to_a_third_of_a_percent() -> None:
    rng = np.random.default_rng(0)
    gaps = rng.lognormal(-4.0, 1.5, 50_000)
    histogram = LogHistogram()
    for part in np.array_split(gaps, 7):
        histogram.add(part)
    wanted = np.percentile(gaps, (50, 90, 99), method="inverted_cdf")
    assert np.allclose(histogram.percentiles_s((50, 90, 99)), wanted, rtol=0.0034)
