from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from capplan.planner.queues import RequestSample, request_sizes, size_weights, with_base_model
from tests.planner.queues.samples import samples

FORMS = ("degree2", "degree1", "output_only")


def sample(prompt: list[int], output: list[int], adapter: list[int]) -> RequestSample:
    """Adapters of ranks 8, 32 and 64, numbered from 1."""
    weights, tokens = with_base_model(np.array([8, 32, 64]) * 1000, np.array([80, 320, 640]))
    columns = (np.array(each) for each in (prompt, output, adapter))
    return RequestSample(*columns, np.ones(len(prompt)), weights, tokens)


@given(samples())
def test_sizes_lie_between_0_and_1(some: RequestSample) -> None:
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


def test_a_request_of_the_base_model_is_as_large_as_one_of_the_smallest_adapter() -> None:
    """With a size of 0 it would always take the fast lane, however long."""
    some = sample([500, 500, 900], [50, 50, 90], [0, 1, 2])
    sizes = request_sizes(size_weights(some, "degree2"), some)
    assert sizes[0] == sizes[1] > 0.0
    assert (some.charges("per_request") - some.charges("none")).tolist() == [0, 80, 320]


def test_the_few_longest_requests_count_as_one_and_do_not_set_the_scale() -> None:
    ordinary = sample([100] * 5000, [10] * 5000, [1] * 5000)
    prompt = ordinary.prompt_tokens.copy()
    prompt[:3] = 100_000
    wrs = size_weights(replace(ordinary, prompt_tokens=prompt), "degree2")
    assert wrs.max_prompt_tokens == 100
    sizes = request_sizes(wrs, replace(ordinary, prompt_tokens=prompt))
    assert np.ptp(sizes) == 0.0


def test_the_largest_adapter_counts_also_when_nobody_asks_for_it() -> None:
    assert size_weights(sample([1], [1], [1]), "degree2").max_adapter_bytes == 64_000
