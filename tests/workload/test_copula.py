"""Prompt and output lengths that go together keep their own distributions."""

import numpy as np
import pytest
from scipy import stats
from scipy.special import ndtr, ndtri

from capplan import Adapter, Lengths, Workload
from capplan.workload import draw_requests, length_table
from capplan.workload._sampling import streams, uniforms
from tests.workload.test_requests import LIMIT, assert_distributed

PROMPTS, OUTPUTS = Lengths(mean=223, std=245), Lengths(mean=194, std=206)


def drawn(correlation, duration_s=2000.0, adapters=None, seed=0):
    w = Workload(
        base_model="m",
        adapters=adapters or [Adapter(name="a", rank=8, rate_rps=100.0)],
        prompt_tokens=PROMPTS,
        output_tokens=OUTPUTS,
        length_correlation=correlation,
    )
    return draw_requests(w, duration_s, seed, LIMIT)


@pytest.mark.parametrize("correlation", [-0.95, -0.4, 0.2, 0.8])
def test_each_length_keeps_its_distribution(correlation):
    r = drawn(correlation)
    for column, lengths in ((r.prompt_tokens, PROMPTS), (r.output_tokens, OUTPUTS)):
        assert_distributed(column, lengths)
        assert column.mean() == pytest.approx(lengths.mean, abs=4 * lengths.std / np.sqrt(len(column)))


@pytest.mark.parametrize("correlation", [-0.95, -0.4, 0.2, 0.8])
def test_ranks_correlate_as_those_of_normal_scores_do(correlation):
    r = drawn(correlation)
    expected = 6 / np.pi * np.arcsin(correlation / 2)
    seen = stats.spearmanr(r.prompt_tokens, r.output_tokens).statistic
    assert seen == pytest.approx(expected, abs=5 / np.sqrt(len(r.adapter)))


def test_outputs_are_those_of_the_definition_but_for_rounding():
    """``F^-1(ndtr(r ndtri(u) + sqrt(1 - r^2) ndtri(v)))``, seldom a token off, the tails aside."""
    r = drawn(-0.4, 500.0)
    keys, n = streams(0), len(r.adapter)
    u, v = uniforms(keys.prompts, n), uniforms(keys.outputs, n)
    inside = (np.minimum(u, v) > 1e-3) & (np.maximum(u, v) < 1 - 1e-3)
    number = ndtr(-0.4 * ndtri(u) + np.sqrt(1 - 0.4**2) * ndtri(v))
    defined = length_table(OUTPUTS, LIMIT).draw(number)
    off = np.abs(defined - r.output_tokens)[inside]
    assert off.max() <= 1
    assert (off > 0).mean() < 1e-3


def test_adapters_with_lengths_of_their_own_correlate_too():
    own = Adapter(name="own", rank=8, rate_rps=50.0, output_tokens=Lengths(mean=40, std=30))
    constant = Adapter(name="constant", rank=8, rate_rps=50.0, prompt_tokens=Lengths(mean=77))
    r = drawn(-0.6, adapters=[own, constant, Adapter(name="a", rank=8, rate_rps=50.0)])
    for number, mean, std in ((1, 40, 30), (2, 194, 206), (3, 194, 206)):
        mine = r.adapter == number
        assert r.output_tokens[mine].mean() == pytest.approx(mean, abs=5 * std / np.sqrt(mine.sum()))
    assert set(r.prompt_tokens[r.adapter == 2]) == {77}
    for number in (1, 3):
        mine = r.adapter == number
        seen = stats.spearmanr(r.prompt_tokens[mine], r.output_tokens[mine]).statistic
        assert seen == pytest.approx(6 / np.pi * np.arcsin(-0.3), abs=0.02)


def test_the_correlation_moves_outputs_only():
    plain, together = drawn(None, 50.0), drawn(0.5, 50.0)
    assert np.array_equal(plain.arrival_ns, together.arrival_ns)
    assert np.array_equal(plain.prompt_tokens, together.prompt_tokens)
    assert not np.array_equal(plain.output_tokens, together.output_tokens)
