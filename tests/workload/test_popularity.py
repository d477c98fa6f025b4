"""Shares of adapters follow the laws of the papers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import InputError, load_workload
from capplan.spec import zipf
from capplan.spec._traffic import exponential, power_law

LAWS = {
    "zipf": (zipf, 0.0, 50.0),
    "power_law": (power_law, 0.001, 1.0),
    "exponential": (exponential, 0.0, 50.0),
}


@given(adapters=st.integers(1, 500), law=st.sampled_from(sorted(LAWS)), data=st.data())
def test_shares_sum_to_one_and_descend(adapters, law, data):
    function, low, high = LAWS[law]
    shares = np.array(function(adapters, data.draw(st.floats(low, high))))
    assert len(shares) == adapters
    assert shares.sum() == pytest.approx(1)
    assert np.all(shares >= 0)
    assert np.all(np.diff(shares) <= 1e-12)


@pytest.mark.parametrize(
    ("shares", "published"),
    [
        (zipf(5, 1), [0.438, 0.219, 0.146, 0.110, 0.088]),
        (zipf(5, 1 / 3), [0.270, 0.214, 0.187, 0.170, 0.158]),
        (zipf(5, 3), [0.843, 0.105, 0.031, 0.013, 0.007]),
        (exponential(5, 1), [0.636, 0.234, 0.086, 0.032, 0.012]),
        (exponential(5, np.log(2)), [0.516, 0.258, 0.129, 0.065, 0.032]),
        (power_law(4, 1), [0.25] * 4),
        (zipf(4, 0), [0.25] * 4),
    ],
)
def test_shares_are_the_published_ones(shares, published):
    assert shares == pytest.approx(published, abs=6e-4)


@pytest.mark.parametrize(("alpha", "top_five"), [(0.1, 0.69), (0.3, 0.33), (0.6, 0.11), (1.0, 0.025)])
def test_the_power_law_is_slora_s_generator(alpha, top_five):
    shares = power_law(200, alpha)
    assert sum(shares[:5]) == pytest.approx(top_five, abs=0.005)
    drawn = np.floor(200 * np.random.default_rng(0).random(200_000) ** (1 / alpha)).astype(int)
    assert np.bincount(drawn, minlength=200)[:5] / 200_000 == pytest.approx(shares[:5], abs=0.004)


@pytest.mark.parametrize(
    ("law", "adapters", "value", "message"),
    [
        (zipf, 0, 1.0, "adapters: must be a whole number >= 1"),
        (zipf, 3, -1.0, "s: must be a number >= 0"),
        (zipf, 3, float("inf"), "s: must be a number >= 0"),
        (power_law, 3, 0.0, "alpha: must be a number above 0 and at most 1"),
        (power_law, 3, 1.5, "alpha: must be"),
        (exponential, 3, float("nan"), "b: must be a number >= 0"),
    ],
)
def test_parameters_out_of_range_are_refused(law, adapters, value, message):
    with pytest.raises(InputError, match=message):
        law(adapters, value)


def loaded(tmp_path, entry):
    path = tmp_path / "workload.yaml"
    path.write_text(
        "base_model: m\nprofile: p\n"
        "requests: {prompt_tokens: {mean: 10}, output_tokens: {mean: 5}}\n"
        f"adapters:\n  - {entry}\n",
        encoding="utf-8",
    )
    return load_workload(path)


@pytest.mark.parametrize(
    ("popularity", "shares"),
    [
        ("{zipf: 1.0}", zipf(20, 1)),
        ("{power_law: 0.3}", power_law(20, 0.3)),
        ("{exponential: 0}", [0.05] * 20),
    ],
)
def test_rates_of_a_group_follow_its_popularity(tmp_path, popularity, shares):
    entry = f'{{name: "a{{i}}", count: 20, rank: 8, popularity: {popularity}, total_rate_rps: 10}}'
    rates = [adapter.rate_rps for adapter in loaded(tmp_path, entry).adapters]
    assert rates == pytest.approx(10 * np.array(shares))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("", "adapters[0].rate_rps: is required"),
        ("popularity: {zipf: 1}", "adapters[0].total_rate_rps: is required: popularity and"),
        ("total_rate_rps: 1", "adapters[0].popularity: is required"),
        ("popularity: {zipf: 1}, total_rate_rps: 1, rate_rps: 1", "adapters[0].rate_rps: does not go with"),
        (
            "popularity: {zipf: 1, power_law: 1}, total_rate_rps: 1",
            "adapters[0].popularity: must give exactly one",
        ),
        ("popularity: {power_law: 2}, total_rate_rps: 1", "popularity.power_law: must be a number above 0"),
        ("popularity: {ziff: 2}, total_rate_rps: 1", "popularity.ziff: unknown key; did you mean 'zipf'?"),
        ("popularity: {zipf: 1}, total_rate_rps: -1", "total_rate_rps: must be a finite number >= 0"),
    ],
)
def test_a_mistake_is_reported_on_its_line(tmp_path, fields, message):
    with pytest.raises(InputError) as caught:
        loaded(tmp_path, f"{{name: a, rank: 8, {fields}}}")
    assert message in str(caught.value)
    assert "workload.yaml:5: adapters[0]" in str(caught.value)
