"""Queues from samples of requests: sizes, settings, recorded conversations."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.serving.pooled import RequestSample, base_model_bytes, design_queues
from capplan.serving.pooled._queue_design import (
    choose_clustering,
    classify,
    cluster_sizes,
    cut_offs,
    queue_loads,
    request_sizes,
    size_weights,
    subsample,
)
from capplan.spec import MOST_QUEUES, QueueConfig, Queues

RANKS = np.array([8, 16, 32, 64, 128])
BYTES_PER_RANK = 2 * 2**20
TOKENS_PER_RANK = 4
"""Llama-7B: 2 MiB of weights per rank (Chameleon, section 3.2), 512 KiB of keys and values per token."""
STEP_S = 0.035


def numbered(adapter_bytes: np.ndarray, adapter_tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return sizes and tokens by number of the adapter; 0 is the base model."""
    return np.append(base_model_bytes(adapter_bytes), adapter_bytes), np.append(0, adapter_tokens)


def azure(traces: Path, seed: int, factor: float = 1.0) -> RequestSample:
    """Lengths of Azure's 2023 conversations, times a factor, with ranks drawn evenly."""
    table = pq.read_table(traces / "azure_llm_2023_conv.parquet")
    prompt, output = (
        np.maximum(1, np.round(table[name].to_numpy() * factor)).astype(np.int64)
        for name in ("prompt_tokens", "output_tokens")
    )
    adapter = np.random.default_rng(seed).integers(1, RANKS.size + 1, prompt.size)
    weights, tokens = numbered(RANKS * BYTES_PER_RANK, RANKS * TOKENS_PER_RANK)
    return RequestSample(prompt, output, adapter, output * STEP_S, weights, tokens)


@st.composite
def samples(draw: st.DrawFn) -> RequestSample:
    """Draw requests, some equal, some of the base model, some with unknown time in execution."""
    count = draw(st.integers(1, 40))
    lengths = st.integers(1, 3000) | st.sampled_from([1, 100])
    ranks = np.array(draw(st.lists(st.sampled_from(RANKS.tolist()), min_size=1, max_size=4)))
    weights, tokens = numbered(ranks * BYTES_PER_RANK, ranks * TOKENS_PER_RANK)
    column = st.lists(lengths, min_size=count, max_size=count).map(np.array)
    times = st.floats(0.001, 100.0) | st.just(np.nan)
    execution_s = np.array(draw(st.lists(times, min_size=count, max_size=count)))
    execution_s[0] = 1.0
    adapters = st.lists(st.integers(0, ranks.size), min_size=count, max_size=count).map(np.array)
    return RequestSample(draw(column), draw(column), draw(adapters), execution_s, weights, tokens)


FORMS = ("degree2", "degree1", "output_only")


def sample(prompt: list[int], output: list[int], adapter: list[int]) -> RequestSample:
    """Adapters of ranks 8, 32 and 64, numbered from 1."""
    weights, tokens = numbered(np.array([8, 32, 64]) * 1000, np.array([80, 320, 640]))
    columns = (np.array(each) for each in (prompt, output, adapter))
    return RequestSample(*columns, np.ones(len(prompt)), weights, tokens)


@given(samples())
def test_sizes_are_between_0_and_1(some: RequestSample) -> None:
    for form in FORMS:
        sizes = request_sizes(size_weights(some, form), some)
        assert np.all((sizes > 0.0) & (sizes <= 1.0))


@pytest.mark.parametrize(
    ("form", "sizes"),
    [
        ("degree2", [(0.4 * 0.5 + 0.6 * 1.0) * 1 / 8, (0.4 * 1.0 + 0.6 * 0.25) * 1.0]),
        ("degree1", [(0.4 * 0.5 + 0.6 * 1.0 + 1 / 8) / 2, (0.4 * 1.0 + 0.6 * 0.25 + 1.0) / 2]),
        ("output_only", [1.0, 0.25]),
    ],
)
def test_the_forms_are_those_of_the_paper(form: str, sizes: list[float]) -> None:
    some = sample([100, 200], [40, 10], [1, 3])
    assert request_sizes(size_weights(some, form), some) == pytest.approx(sizes)  # type: ignore[arg-type]


def test_base_model_requests_have_the_size_of_the_smallest_adapter() -> None:
    """With size 0 they would always be in the first queue."""
    some = sample([500, 500, 900], [50, 50, 90], [0, 1, 2])
    sizes = request_sizes(size_weights(some, "degree2"), some)
    assert sizes[0] == sizes[1] > 0.0
    assert (some.charges("per_request") - some.charges("none")).tolist() == [0, 80, 320]


def test_outlying_lengths_do_not_set_the_scale() -> None:
    ordinary = sample([100] * 5000, [10] * 5000, [1] * 5000)
    prompt = ordinary.prompt_tokens.copy()
    prompt[:3] = 100_000
    wrs = size_weights(replace(ordinary, prompt_tokens=prompt), "degree2")
    assert wrs.max_prompt_tokens == 100
    sizes = request_sizes(wrs, replace(ordinary, prompt_tokens=prompt))
    assert np.ptp(sizes) == 0.0


def test_the_largest_adapter_counts_without_requests() -> None:
    assert size_weights(sample([1], [1], [1]), "degree2").max_adapter_bytes == 64_000


MANY_TOKENS = 10**8

configs = st.builds(
    QueueConfig,
    size=st.sampled_from(["degree2", "degree1", "output_only"]),
    clusters=st.sampled_from(["elbow", "wcss", "silhouette"]),
    max_queues=st.integers(1, MOST_QUEUES),
    quota_size=st.sampled_from(["max", "p99", "mean"]),
    rest=st.sampled_from(["minimum", "load", "rate"]),
    percentile=st.none() | st.just(0.99),
    adapter_charge=st.sampled_from(["shared", "per_request", "none"]),
)


def queue_of(queues: Queues, sample: RequestSample) -> np.ndarray:
    """Return the queue of each request by the bounds in the plan."""
    sizes = request_sizes(queues.wrs, sample)
    inside = np.array(
        [
            [(low is None or size >= low) and (high is None or size < high) for size in sizes]
            for low, high in itertools.pairwise([None, *(each.upper_wrs for each in queues.classes)])
        ]
    )
    assert np.all(inside.sum(axis=0) == 1)
    return inside.argmax(axis=0)


@given(samples(), configs)
def test_every_request_has_one_queue_with_enough_tokens(sample: RequestSample, wanted: QueueConfig) -> None:
    queues = design_queues(sample, rate_rps=2.0, kv_tokens=MANY_TOKENS, bound_s=10.0, config=wanted)
    uppers = [each.upper_wrs for each in queues.classes[:-1]]
    assert all(low < high for low, high in itertools.pairwise(uppers))
    assert len(queues.classes) <= wanted.max_queues
    assert sum(each.quota_tokens for each in queues.classes) == MANY_TOKENS
    queue, charges = queue_of(queues, sample), sample.charges(wanted.adapter_charge)
    least = sample.loads(queue, 2.0, wanted.quota_size, wanted.adapter_charge)
    for number, each in enumerate(queues.classes):
        assert each.quota_tokens >= charges[queue == number].max()
    for load, each in zip(least, queues.classes, strict=True):
        assert each.quota_tokens >= load.least_tokens(10.0, wanted.percentile)


@given(samples(), configs, st.integers(-2000, 2000))
def test_tokens_are_missing_exactly_if_the_minima_do_not_fit(
    sample: RequestSample, wanted: QueueConfig, spare: int
) -> None:
    def made(kv_tokens: int) -> Queues:
        return design_queues(sample, rate_rps=0.5, kv_tokens=kv_tokens, bound_s=20.0, config=wanted)

    loads = sample.loads(queue_of(made(MANY_TOKENS), sample), 0.5, wanted.quota_size, wanted.adapter_charge)
    needed = sum(max(load.least_tokens(20.0, wanted.percentile), load.largest_tokens) for load in loads)
    queues = made(max(len(loads), needed + spare))
    assert (queues.missing_tokens or 0) == max(0, needed - max(len(loads), needed + spare))


@given(samples())
def test_queues_do_not_depend_on_the_order_of_requests(sample: RequestSample) -> None:
    turned = RequestSample(
        *(column[::-1] for column in (sample.prompt_tokens, sample.output_tokens, sample.adapter)),
        sample.execution_s[::-1],
        sample.adapter_bytes,
        sample.adapter_tokens,
    )
    made = [
        design_queues(each, rate_rps=1.0, kv_tokens=MANY_TOKENS, bound_s=5.0) for each in (sample, turned)
    ]
    uppers = [[queue.upper_wrs for queue in each.classes[:-1]] for each in made]
    assert uppers[0] == pytest.approx(uppers[1])
    quotas = [[queue.quota_tokens for queue in each.classes] for each in made]
    assert quotas[0] == pytest.approx(quotas[1], rel=1e-6)


@pytest.mark.parametrize("clusters", ["elbow", "wcss", "silhouette"])
def test_equal_requests_have_one_queue_with_all_tokens(clusters: str) -> None:
    ones = np.ones(100, np.int64)
    sample = RequestSample(200 * ones, 50 * ones, ones, ones * 1.5, np.array([16, 16]), np.array([0, 32]))
    wanted = QueueConfig(clusters=clusters)  # type: ignore[arg-type]
    queues = design_queues(sample, rate_rps=1.0, kv_tokens=5000, bound_s=10.0, config=wanted)
    assert [each.model_dump() for each in queues.classes] == [{"upper_wrs": None, "quota_tokens": 5000}]


@given(samples(), st.integers(4, 10**6))
def test_static_queues_have_equal_ranges_and_equal_quotas(sample: RequestSample, tokens: int) -> None:
    queues = design_queues(sample, rate_rps=1.0, kv_tokens=tokens, bound_s=5.0, static=True)
    sizes = request_sizes(queues.wrs, sample)
    uppers = [each.upper_wrs for each in queues.classes[:-1]]
    width = np.ptp(sizes) / 4
    if len(queues.classes) == 4:
        assert uppers == pytest.approx([sizes.min() + width * i for i in (1, 2, 3)])
    else:
        assert width == pytest.approx(0.0, abs=1e-15)
    quotas = [each.quota_tokens for each in queues.classes]
    assert sum(quotas) == tokens
    assert max(quotas) - min(quotas) <= 1


@pytest.mark.parametrize(("factor", "bound_s", "fits"), [(1.0, 37.0, False), (0.2, 5.0, True)])
def test_quotas_of_recorded_conversations(
    traces_dir: Path, factor: float, bound_s: float, fits: bool
) -> None:
    """Chameleon's setting: 57,000 KV tokens are too few for recorded lengths, and enough for a fifth."""
    sample = azure(traces_dir, 0, factor)
    queues = design_queues(sample, rate_rps=9.0, kv_tokens=57_000, bound_s=bound_s)
    assert len(queues.classes) == 3
    assert sum(each.quota_tokens for each in queues.classes) == 57_000
    assert (queues.missing_tokens is None) == fits
    demand = 9.0 * np.mean(sample.charges("per_request") * sample.output_tokens * STEP_S)
    assert (demand < 57_000) == fits


@pytest.mark.parametrize("seed", range(3))
def test_number_of_queues_of_recorded_conversations(traces_dir: Path, seed: int) -> None:
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


def minimum_tokens(sample: RequestSample, size: str, bound_s: float) -> int:
    sizes = request_sizes(size_weights(sample, "degree2"), sample)
    thin = subsample(sizes)
    queue = classify(sizes, cut_offs(choose_clustering(cluster_sizes(thin, 4), thin, "elbow")))
    charges = sample.charges("per_request")
    loads = queue_loads(charges, sample.execution_s, queue, 9.0, size)  # type: ignore[arg-type]
    return sum(load.least_tokens(bound_s) for load in loads)


@pytest.mark.parametrize(
    ("factor", "size", "tokens"), [(1.0, "max", 0.8e6), (1.0, "p99", 0.34e6), (0.2, "max", 37e3)]
)
def test_minimum_tokens_of_recorded_conversations(
    traces_dir: Path, factor: float, size: str, tokens: float
) -> None:
    """The bound is 5 s for lengths x 0.2 (Chameleon, section 5.1), else in proportion; mean over draws."""
    bound_s = 5.0 * factor / 0.2
    sums = [minimum_tokens(azure(traces_dir, seed, factor), size, bound_s) for seed in range(8)]
    assert np.mean(sums) == pytest.approx(tokens, rel=0.25)
