import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import InfeasibleError
from capplan.planner.queue_clusters import choose_clustering, classify, cluster_sizes, cut_offs, subsample
from capplan.planner.queues import RequestSample, plan_queues, queue_loads, request_sizes, size_weights
from capplan.spec import QueueConfig, Queues
from tests.planner.queues.samples import STEP_S, azure, samples

MANY_TOKENS = 10**8

wishes = st.builds(
    QueueConfig,
    size=st.sampled_from(["degree2", "degree1", "output_only"]),
    clusters=st.sampled_from(["elbow", "wcss", "silhouette"]),
    max_queues=st.integers(1, 5),
    quota_size=st.sampled_from(["max", "p99", "mean"]),
    rest=st.sampled_from(["minimum", "load", "rate"]),
    percentile=st.none() | st.just(0.99),
    adapter_charge=st.sampled_from(["per_request", "none"]),
)


def queue_of(queues: Queues, sample: RequestSample) -> np.ndarray:
    """Return the queue of each request, read off the plan alone."""
    sizes = request_sizes(queues.wrs, sample)
    inside = np.array(
        [
            [(low is None or size >= low) and (high is None or size < high) for size in sizes]
            for low, high in itertools.pairwise([None, *(each.upper_wrs for each in queues.classes)])
        ]
    )
    assert np.all(inside.sum(axis=0) == 1)
    return inside.argmax(axis=0)


@given(samples(), wishes)
def test_every_request_has_one_queue_and_every_queue_tokens_for_its_largest(
    sample: RequestSample, wanted: QueueConfig
) -> None:
    queues = plan_queues(sample, rate_rps=2.0, kv_tokens=MANY_TOKENS, bound_s=10.0, wishes=wanted)
    uppers = [each.upper_wrs for each in queues.classes[:-1]]
    assert all(low < high for low, high in itertools.pairwise(uppers))
    assert len(queues.classes) <= wanted.max_queues
    assert sum(each.quota_tokens for each in queues.classes) == MANY_TOKENS
    queue, charges = queue_of(queues, sample), sample.charges(wanted.adapter_charge)
    for number, each in enumerate(queues.classes):
        assert each.quota_tokens >= charges[queue == number].max()
    least = queue_loads(charges, sample.execution_s, queue, 2.0, wanted.quota_size)
    for load, each in zip(least, queues.classes, strict=True):
        assert each.quota_tokens >= load.least_tokens(10.0, wanted.percentile)


@given(samples(), wishes, st.integers(-2000, 2000))
def test_quotas_are_refused_just_where_the_minima_no_longer_fit(
    sample: RequestSample, wanted: QueueConfig, spare: int
) -> None:
    def made(kv_tokens: int) -> Queues:
        return plan_queues(sample, rate_rps=0.5, kv_tokens=kv_tokens, bound_s=20.0, wishes=wanted)

    queue, charges = queue_of(made(MANY_TOKENS), sample), sample.charges(wanted.adapter_charge)
    loads = queue_loads(charges, sample.execution_s, queue, 0.5, wanted.quota_size)
    needed = sum(max(load.least_tokens(20.0, wanted.percentile), load.largest_tokens) for load in loads)
    if spare < 0:
        with pytest.raises(InfeasibleError, match="more than"):
            made(needed + spare)
    else:
        assert sum(each.quota_tokens for each in made(needed + spare).classes) == needed + spare


@given(samples())
def test_the_same_requests_in_another_order_have_the_same_queues(sample: RequestSample) -> None:
    turned = RequestSample(
        *(column[::-1] for column in (sample.prompt_tokens, sample.output_tokens, sample.adapter)),
        sample.execution_s[::-1],
        sample.adapter_bytes,
        sample.adapter_tokens,
    )
    made = [plan_queues(each, rate_rps=1.0, kv_tokens=MANY_TOKENS, bound_s=5.0) for each in (sample, turned)]
    uppers = [[queue.upper_wrs for queue in each.classes[:-1]] for each in made]
    assert uppers[0] == pytest.approx(uppers[1])
    quotas = [[queue.quota_tokens for queue in each.classes] for each in made]
    assert quotas[0] == pytest.approx(quotas[1], rel=1e-6)


@pytest.mark.parametrize("clusters", ["elbow", "wcss", "silhouette"])
def test_equal_requests_have_one_queue_with_all_tokens(clusters: str) -> None:
    ones = np.ones(100, np.int64)
    sample = RequestSample(200 * ones, 50 * ones, ones, ones * 1.5, np.array([16, 16]), np.array([0, 32]))
    wanted = QueueConfig(clusters=clusters)  # type: ignore[arg-type]
    queues = plan_queues(sample, rate_rps=1.0, kv_tokens=5000, bound_s=10.0, wishes=wanted)
    assert [each.model_dump() for each in queues.classes] == [{"upper_wrs": None, "quota_tokens": 5000}]


def test_queues_that_need_too_much_are_refused(traces_dir: Path) -> None:
    """Chameleon's own setting with lengths as recorded: 57,000 tokens of KV are far too few."""
    with pytest.raises(
        InfeasibleError, match=r"more than the 57,000 of KV; queue \d of 3 needs most"
    ) as error:
        plan_queues(azure(traces_dir, 0), rate_rps=9.0, kv_tokens=57_000, bound_s=37.0)
    assert error.value.reason == "slo"


@pytest.mark.parametrize("seed", range(3))
def test_recorded_conversations_make_as_many_queues_as_the_notes_say(traces_dir: Path, seed: int) -> None:
    """Shares of the sum of squares for 1, 2, ... queues, and what each rule makes of them."""
    sample = azure(traces_dir, seed)
    sizes = subsample(request_sizes(size_weights(sample, "degree2"), sample))
    found = cluster_sizes(sizes, 6)
    shares = [each.wcss / found[0].wcss for each in found]
    assert shares == pytest.approx([1.0, 0.29, 0.11, 0.06, 0.04, 0.03], abs=0.03)
    numbers = {
        rule: len(choose_clustering(found[:4], sizes, rule).centroids)
        for rule in ("elbow", "wcss", "silhouette")
    }
    assert numbers == {"elbow": 3, "wcss": 4, "silhouette": 2}


def sum_of_minima(sample: RequestSample, size: str, bound_s: float) -> int:
    sizes = request_sizes(size_weights(sample, "degree2"), sample)
    thin = subsample(sizes)
    queue = classify(sizes, cut_offs(choose_clustering(cluster_sizes(thin, 4), thin, "elbow")))
    charges = sample.charges("per_request")
    loads = queue_loads(charges, sample.execution_s, queue, 9.0, size)  # type: ignore[arg-type]
    return sum(load.least_tokens(bound_s) for load in loads)


@pytest.mark.parametrize(
    ("factor", "size", "tokens"), [(1.0, "max", 0.8e6), (1.0, "p99", 0.34e6), (0.2, "max", 37e3)]
)
def test_minima_of_recorded_conversations_are_about_what_the_notes_say(
    traces_dir: Path, factor: float, size: str, tokens: float
) -> None:
    """9 requests per second; the bound is 5 s for lengths x 0.2 (Chameleon, section 5.1), else in proportion.

    The largest request of a queue depends on which ranks are drawn, so this is a mean over draws.
    """
    bound_s = 5.0 * factor / 0.2
    sums = [sum_of_minima(azure(traces_dir, seed, factor), size, bound_s) for seed in range(8)]
    assert np.mean(sums) == pytest.approx(tokens, rel=0.25)


def test_shorter_conversations_fit_where_whole_ones_do_not(traces_dir: Path) -> None:
    sample = azure(traces_dir, 0, 0.2)
    queues = plan_queues(sample, rate_rps=9.0, kv_tokens=57_000, bound_s=5.0)
    assert len(queues.classes) == 3
    assert sum(each.quota_tokens for each in queues.classes) == 57_000
    demand = 9.0 * np.mean(sample.charges("per_request") * sample.output_tokens * STEP_S)
    assert demand < 57_000
